// global_average_pool() on a GPU; other pooling is cuDNN's (pool.cpp).
#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// x lies in N, pixels, C order. No size is zero.
struct AveragePoolShape {
  std::uint32_t images = 0, pixels = 0, channels = 0;
};

AveragePoolShape shape_of(const Tensor& x) {
  // Images are a dimension of the grid, and an image's elements are counted in 32 bits.
  TOPKNOT_CHECK(x.layout() == Layout::nhwc && x.numel() > 0 && x.dim(0) <= 65535 &&
                    x.numel() / x.dim(0) < std::int64_t{1} << 31,
                "global_average_pool: 1 to 65,535 images in nhwc order, not " + x.shape().str());
  return {word(x.dim(0)), word(x.dim(2) * x.dim(3)), word(x.dim(1))};
}

// y[n, c] = scale times the sum of x[n, ., c] in the order of the pixels, as on the CPU.
// One thread per channel of an image.
template <class T>
__global__ void __launch_bounds__(kThreads)
    average_forward_kernel(const T* __restrict__ x, T* __restrict__ y, AveragePoolShape s, float scale) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= std::size_t{s.images} * s.channels) return;
  const std::size_t image = i / s.channels, channel = i % s.channels;
  const T* from = x + image * s.pixels * s.channels + channel;
  float sum = 0;
#pragma unroll 8
  for (std::uint32_t p = 0; p < s.pixels; ++p) sum += as_float(from[std::size_t{p} * s.channels]);
  y[i] = from_float<T>(sum * scale);
}

void forward(const Tensor& x, Tensor& y) {
  const AveragePoolShape s = shape_of(x);
  by_type(x, [&](auto type) {
    using T = decltype(type);
    launch(average_forward_kernel<T>, grid_for(std::size_t{s.images} * s.channels, kThreads), kThreads,
           compute_stream(), x.as<T>(), y.as<T>(), s, 1.0f / static_cast<float>(s.pixels));
  });
}

// dx[n, ., c] = scale dy[n, c].
// A block goes through pixels of one image, its threads side by side over the channels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    average_backward_kernel(const T* __restrict__ dy, T* __restrict__ dx, AveragePoolShape s, float scale) {
  const std::uint32_t per_image = s.pixels * s.channels;
  const T* from = dy + std::size_t{blockIdx.y} * s.channels;
  T* to = dx + std::size_t{blockIdx.y} * per_image;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < per_image; i += gridDim.x * kThreads)
    __stcs(to + i, from_float<T>(as_float(from[i % s.channels]) * scale));
}

void backward(const Tensor& dy, Tensor& dx) {
  const AveragePoolShape s = shape_of(dx);
  const unsigned blocks = grid_for(std::size_t{s.pixels} * s.channels, kThreads * 4).x;
  by_type(dx, [&](auto type) {
    using T = decltype(type);
    launch(average_backward_kernel<T>, dim3(blocks, s.images), kThreads, compute_stream(), dy.as<T>(),
           dx.as<T>(), s, 1.0f / static_cast<float>(s.pixels));
  });
}

const RegisterKernels<GlobalAveragePoolKernels> registered(DeviceKind::cuda,
                                                           {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
