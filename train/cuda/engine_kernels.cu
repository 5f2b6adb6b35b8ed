#include "train/cuda/engine_kernels.h"

#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

__global__ void add_scaled_kernel(double* sum, const float* value, double factor) {
  *sum += factor * static_cast<double>(*value);
}

__global__ void result_kernel(const StepStatus* status, const float* loss, StepReport* result) {
  result->status = *status;
  result->loss = *loss;
}

__global__ void count_up_kernel(std::uint32_t* values, std::uint32_t first, std::uint32_t n) {
  for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x) values[i] = first + i;
}

}  // namespace

void add_scaled(cudaStream_t stream, double* sum, const float* value, double factor) {
  launch(add_scaled_kernel, 1, 1, stream, sum, value, factor);
}

void write_result(cudaStream_t stream, const StepStatus* status, const float* loss, StepReport* result) {
  launch(result_kernel, 1, 1, stream, status, loss, result);
}

void count_up(cudaStream_t stream, std::uint32_t* values, std::uint32_t first, std::uint32_t n) {
  launch(count_up_kernel, 1, 32, stream, values, first, n);
}

}  // namespace topknot::cuda
