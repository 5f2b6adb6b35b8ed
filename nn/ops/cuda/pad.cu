#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/pad_kernels.h"

namespace topknot::cuda {
namespace {

// A thread for each element of `out`, whose images are height x width; `in` has others of the same corner. Outside those:
// `value`.
template <class T>
__global__ void __launch_bounds__(kThreads)
    corner_kernel(const T* in, T* out, PadShape to, std::uint32_t from_height, std::uint32_t from_width,
                  std::uint32_t n, float value) {
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= n) return;
  const std::uint32_t item = static_cast<std::uint32_t>(at), c = item % to.channels,
                      pixel = item / to.channels;
  const std::uint32_t j = pixel % to.width, row = pixel / to.width, i = row % to.height,
                      image = row / to.height;
  out[item] = i < from_height && j < from_width
                  ? in[((std::size_t{image} * from_height + i) * from_width + j) * to.channels + c]
                  : from_float<T>(value);
}

template <class T>
void corner(cudaStream_t stream, const void* in, void* out, PadShape to, std::uint32_t from_height,
            std::uint32_t from_width, float value) {
  const std::uint32_t n = to.images * to.height * to.width * to.channels;
  if (n > 0)
    launch(corner_kernel<T>, grid_for(n, kThreads), kThreads, stream, static_cast<const T*>(in),
           static_cast<T*>(out), to, from_height, from_width, n, value);
}

}  // namespace

void pad_forward(cudaStream_t stream, bool bf16, const void* x, void* y, PadShape s, float value) {
  const PadShape to{s.images, s.channels, s.large_height, s.large_width, 0, 0};
  (bf16 ? corner<__nv_bfloat16> : corner<float>)(stream, x, y, to, s.height, s.width, value);
}
void pad_backward(cudaStream_t stream, bool bf16, const void* dy, void* dx, PadShape s) {
  (bf16 ? corner<__nv_bfloat16> : corner<float>)(stream, dy, dx, s, s.large_height, s.large_width, 0.0f);
}

}  // namespace topknot::cuda
