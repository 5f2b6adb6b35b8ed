#include "nn/base/checksum.h"
#include "nn/core/cuda/device_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kPerThread = 4;

__global__ void fill_kernel(float* data, std::size_t n, float value) {
  std::size_t i = (std::size_t{blockIdx.x} * kThreads * kPerThread) + threadIdx.x;
  for (int j = 0; j < kPerThread; ++j, i += kThreads)
    if (i < n) data[i] = value;
}

template <class T>
__global__ void add_kernel(const T* a, const T* b, T* out, std::size_t n) {
  std::size_t i = (std::size_t{blockIdx.x} * kThreads * kPerThread) + threadIdx.x;
  for (int j = 0; j < kPerThread; ++j, i += kThreads)
    if (i < n) out[i] = from_float<T>(as_float(a[i]) + as_float(b[i]));
}

__global__ void __launch_bounds__(kThreads)
    add_scaled_kernel(float* sum, const float* values, std::size_t n, float factor) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) sum[i] += factor * values[i];
}

__global__ void add_to_sum_kernel(double* sum, const float* value, double factor) {
  *sum += factor * static_cast<double>(*value);
}

__global__ void __launch_bounds__(kThreads)
    restore_kernel(const StepStatus* status, const float* from, float* to, std::size_t n) {
  if (status->bad == 0) return;
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) to[i] = from[i];
}

__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const float* data, std::size_t n, unsigned long long* sum) {
  std::uint64_t mine = 0;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * kThreads)
    mine += checksum_term(i, __float_as_uint(data[i]));
  mine = block_sum(mine);
  if (threadIdx.x == 0) atomicAdd(sum, static_cast<unsigned long long>(mine));
}

__global__ void time_kernel(std::uint64_t* at) {
  *at = global_nanoseconds();
}

}  // namespace

void fill_floats(cudaStream_t stream, float* data, std::size_t n, float value) {
  if (n > 0) launch(fill_kernel, grid_for(n, kThreads * kPerThread), kThreads, stream, data, n, value);
}

void add_floats(cudaStream_t stream, const float* a, const float* b, float* out, std::size_t n) {
  if (n > 0) launch(add_kernel<float>, grid_for(n, kThreads * kPerThread), kThreads, stream, a, b, out, n);
}

void add_bfloat16(cudaStream_t stream, const void* a, const void* b, void* out, std::size_t n) {
  using T = __nv_bfloat16;
  if (n > 0)
    launch(add_kernel<T>, grid_for(n, kThreads * kPerThread), kThreads, stream, static_cast<const T*>(a),
           static_cast<const T*>(b), static_cast<T*>(out), n);
}

void add_scaled_floats(cudaStream_t stream, float* sum, const float* values, std::size_t n, float factor) {
  if (n > 0) launch(add_scaled_kernel, grid_for(n, kThreads), kThreads, stream, sum, values, n, factor);
}

void add_to_sum(cudaStream_t stream, double* sum, const float* value, double factor) {
  launch(add_to_sum_kernel, 1, 1, stream, sum, value, factor);
}

void restore_if_bad(cudaStream_t stream, const StepStatus* status, const float* from, float* to,
                    std::size_t n) {
  if (n > 0) launch(restore_kernel, grid_for(n, kThreads), kThreads, stream, status, from, to, n);
}

void write_time(cudaStream_t stream, std::uint64_t* at) {
  launch(time_kernel, 1, 1, stream, at);
}

void add_checksum(cudaStream_t stream, const float* data, std::size_t n, std::uint64_t* sum) {
  static_assert(sizeof(unsigned long long) == sizeof *sum);
  if (n > 0)
    launch(checksum_kernel, grid_for(n, kThreads * kPerThread, 2048), kThreads, stream, data, n,
           reinterpret_cast<unsigned long long*>(sum));
}

}  // namespace topknot::cuda
