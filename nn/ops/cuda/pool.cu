#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/pool_kernels.h"

namespace topknot::cuda {
namespace {

// A thread a channel of an image.
template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* __restrict__ x, T* __restrict__ y, AveragePoolShape s, float scale) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= std::size_t{s.images} * s.channels) return;
  const std::size_t image = i / s.channels, channel = i % s.channels;
  const T* from = x + image * s.pixels * s.channels + channel;
  float sum = 0;
#pragma unroll 8
  for (std::uint32_t p = 0; p < s.pixels; ++p) sum += as_float(from[std::size_t{p} * s.channels]);
  y[i] = from_float<T>(sum * scale);
}

// A block goes through pixels of one image, its threads side by side over the channels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* __restrict__ dy, T* __restrict__ dx, AveragePoolShape s, float scale) {
  const std::uint32_t per_image = s.pixels * s.channels;
  const T* from = dy + std::size_t{blockIdx.y} * s.channels;
  T* to = dx + std::size_t{blockIdx.y} * per_image;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < per_image; i += gridDim.x * kThreads)
    __stcs(to + i, from_float<T>(as_float(from[i % s.channels]) * scale));
}

template <class T>
void forward_of(cudaStream_t stream, const void* x, void* y, AveragePoolShape s) {
  launch(forward_kernel<T>, grid_for(std::size_t{s.images} * s.channels, kThreads), kThreads, stream,
         static_cast<const T*>(x), static_cast<T*>(y), s, 1.0f / static_cast<float>(s.pixels));
}
template <class T>
void backward_of(cudaStream_t stream, const void* dy, void* dx, AveragePoolShape s) {
  const unsigned blocks = grid_for(std::size_t{s.pixels} * s.channels, kThreads * 4).x;
  launch(backward_kernel<T>, dim3(blocks, s.images), kThreads, stream, static_cast<const T*>(dy),
         static_cast<T*>(dx), s, 1.0f / static_cast<float>(s.pixels));
}

}  // namespace

void average_pool_forward(cudaStream_t stream, bool bf16, const void* x, void* y, AveragePoolShape shape) {
  (bf16 ? forward_of<__nv_bfloat16> : forward_of<float>)(stream, x, y, shape);
}
void average_pool_backward(cudaStream_t stream, bool bf16, const void* dy, void* dx, AveragePoolShape shape) {
  (bf16 ? backward_of<__nv_bfloat16> : backward_of<float>)(stream, dy, dx, shape);
}

}  // namespace topknot::cuda
