#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/concat_kernels.h"

namespace topknot::cuda {
namespace {

// A thread for each element that moves.
template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_channels_kernel(const T* x, T* y, ChannelCopy c, std::uint32_t n, bool accumulate) {
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= n) return;
  const std::uint32_t item = static_cast<std::uint32_t>(at), i = item % c.count, row = item / c.count;
  const T in = x[std::size_t{row} * c.from_channels + c.from + i * c.from_step];
  T* const out = y + std::size_t{row} * c.to_channels + c.to + i * c.to_step;
  *out = accumulate ? from_float<T>(as_float(*out) + as_float(in)) : in;
}

template <class T>
void copy_channels_of(cudaStream_t stream, const void* x, void* y, ChannelCopy c, bool accumulate) {
  const std::uint32_t n = c.rows * c.count;
  if (n > 0)
    launch(copy_channels_kernel<T>, grid_for(n, kThreads), kThreads, stream, static_cast<const T*>(x),
           static_cast<T*>(y), c, n, accumulate);
}

}  // namespace

void copy_channels(cudaStream_t stream, bool bf16, const void* x, void* y, ChannelCopy copy,
                   bool accumulate) {
  (bf16 ? copy_channels_of<__nv_bfloat16> : copy_channels_of<float>)(stream, x, y, copy, accumulate);
}

}  // namespace topknot::cuda
