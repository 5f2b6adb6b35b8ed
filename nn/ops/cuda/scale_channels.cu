#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// x lies in N, pixels, C order, s is [N, C]; fewer than 2^32 elements.
struct ScaleShape {
  std::uint32_t images, pixels, channels;
};

ScaleShape shape_of(const Tensor& x) {
  check_counted_nhwc("scale_channels", x);
  return {word(x.dim(0)), word(x.dim(2) * x.dim(3)), word(x.dim(1))};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const T* x, const T* s, T* y, ScaleShape shape, std::uint32_t n) {
  const std::size_t at = awaited_index();
  if (at >= n) return;
  const std::uint32_t i = static_cast<std::uint32_t>(at), c = i % shape.channels,
                      image = i / shape.channels / shape.pixels;
  y[i] = from_float<T>(as_float(x[i]) * as_float(s[std::size_t{image} * shape.channels + c]));
}

void forward(const Tensor& x, const Tensor& s, Tensor& y) {
  const ScaleShape shape = shape_of(x);
  const std::uint32_t n = shape.images * shape.pixels * shape.channels;
  by_type(x, [&]<class T>(T) { launch_each(n, scale_kernel<T>, x.as<T>(), s.as<T>(), y.as<T>(), shape, n); });
}

// A thread for each channel of an image: summed in the order of the pixels, as on the CPU.
template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_gradient_kernel(const T* x, const T* dy, T* ds, ScaleShape shape) {
  const std::size_t i = awaited_index();
  if (i >= std::size_t{shape.images} * shape.channels) return;
  const std::size_t first = i / shape.channels * shape.pixels * shape.channels + i % shape.channels;
  float sum = 0;
  for (std::uint32_t p = 0; p < shape.pixels; ++p) {
    const std::size_t at = first + std::size_t{p} * shape.channels;
    sum += as_float(dy[at]) * as_float(x[at]);
  }
  ds[i] = from_float<T>(sum);
}

void scale_gradient(const Tensor& x, const Tensor& dy, Tensor& ds) {
  const ScaleShape shape = shape_of(x);
  by_type(x, [&]<class T>(T) {
    launch_each(std::size_t{shape.images} * shape.channels, scale_gradient_kernel<T>, x.as<T>(), dy.as<T>(),
                ds.as<T>(), shape);
  });
}

const bool registered =
    add_cuda_kernels<ScaleChannelsKernels>({.forward = forward, .scale_gradient = scale_gradient});

}  // namespace
}  // namespace topknot::cuda
