#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/scale_channels_kernels.h"

namespace topknot::cuda {
namespace {

// A thread for each element.
template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const T* x, const T* s, T* y, ScaleShape shape, std::uint32_t n) {
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= n) return;
  const std::uint32_t i = static_cast<std::uint32_t>(at), c = i % shape.channels,
                      image = i / shape.channels / shape.pixels;
  y[i] = from_float<T>(as_float(x[i]) * as_float(s[std::size_t{image} * shape.channels + c]));
}

// A thread for each channel of an image.
template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_gradient_kernel(const T* x, const T* dy, T* ds, ScaleShape shape) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= std::size_t{shape.images} * shape.channels) return;
  const std::size_t first = i / shape.channels * shape.pixels * shape.channels + i % shape.channels;
  float sum = 0;
  for (std::uint32_t p = 0; p < shape.pixels; ++p) {
    const std::size_t at = first + std::size_t{p} * shape.channels;
    sum += as_float(dy[at]) * as_float(x[at]);
  }
  ds[i] = from_float<T>(sum);
}

template <class T>
void scale_of(cudaStream_t stream, const void* x, const void* s, void* y, ScaleShape shape) {
  const std::uint32_t n = shape.images * shape.pixels * shape.channels;
  if (n > 0)
    launch(scale_kernel<T>, grid_for(n, kThreads), kThreads, stream, static_cast<const T*>(x),
           static_cast<const T*>(s), static_cast<T*>(y), shape, n);
}
template <class T>
void scale_gradient_of(cudaStream_t stream, const void* x, const void* dy, void* ds, ScaleShape shape) {
  launch(scale_gradient_kernel<T>, grid_for(std::size_t{shape.images} * shape.channels, kThreads), kThreads,
         stream, static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<T*>(ds), shape);
}

}  // namespace

void scale_channels(cudaStream_t stream, bool bf16, const void* x, const void* s, void* y, ScaleShape shape) {
  (bf16 ? scale_of<__nv_bfloat16> : scale_of<float>)(stream, x, s, y, shape);
}
void scale_gradient(cudaStream_t stream, bool bf16, const void* x, const void* dy, void* ds,
                    ScaleShape shape) {
  (bf16 ? scale_gradient_of<__nv_bfloat16> : scale_gradient_of<float>)(stream, x, dy, ds, shape);
}

}  // namespace topknot::cuda
