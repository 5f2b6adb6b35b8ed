#include "train/cuda/step_kernels.h"

#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

__global__ void result_kernel(const StepStatus* status, const float* loss, StepReport* result) {
  result->status = *status;
  result->loss = *loss;
}

__global__ void count_up_kernel(std::uint32_t* values, std::uint32_t first, std::uint32_t n) {
  for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x) values[i] = first + i;
}

}  // namespace

void write_result(cudaStream_t stream, const StepStatus* status, const float* loss, StepReport* result) {
  launch(result_kernel, 1, 1, stream, status, loss, result);
}

void count_up(cudaStream_t stream, std::uint32_t* values, std::uint32_t first, std::uint32_t n) {
  launch(count_up_kernel, 1, 32, stream, values, first, n);
}

}  // namespace topknot::cuda
