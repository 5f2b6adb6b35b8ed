#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// Tensors of [pixels, channels].
struct LrnShape {
  std::uint32_t elements, channels;
  std::uint32_t half;  // channels on either side
  float alpha, beta, k;
};

LrnShape shape_of(const LrnOptions& o, const Tensor& x) {
  check_counted_nhwc("local_response_norm", x);
  return {word(x.numel()), word(x.dim(1)), word(o.size / 2), o.alpha, o.beta, o.k};
}

// Calls fn(j) for the channels j around c.
__device__ void for_each_neighbour(const LrnShape& s, std::uint32_t c, const auto& fn) {
  const std::uint32_t begin = c < s.half ? 0 : c - s.half,
                      end = c + s.half < s.channels ? c + s.half + 1 : s.channels;
  for (std::uint32_t j = begin; j < end; ++j) fn(j);
}

// d_c of the pixel whose channels begin at x.
template <class T>
__device__ float denominator(const T* x, std::uint32_t c, const LrnShape& s) {
  float squares = 0;
  for_each_neighbour(s, c, [&](std::uint32_t j) { squares += as_float(x[j]) * as_float(x[j]); });
  return s.k + s.alpha * squares;
}

// A thread for each element. The neighbours lie side by side, so that they come from the cache.
template <class T>
__global__ void __launch_bounds__(kThreads) lrn_forward_kernel(const T* x, T* y, LrnShape s) {
  const std::size_t at = awaited_index();
  if (at >= s.elements) return;
  const std::uint32_t i = static_cast<std::uint32_t>(at), c = i % s.channels;
  y[i] = from_float<T>(as_float(x[i]) * powf(denominator(x + (i - c), c, s), -s.beta));
}

template <class T>
__global__ void __launch_bounds__(kThreads) lrn_backward_kernel(const T* x, const T* dy, T* dx, LrnShape s) {
  const std::size_t at = awaited_index();
  if (at >= s.elements) return;
  const std::uint32_t i = static_cast<std::uint32_t>(at), c = i % s.channels;
  const T *pixel = x + (i - c), *grad = dy + (i - c);
  float sum = 0;
  for_each_neighbour(s, c, [&](std::uint32_t j) {
    sum += as_float(grad[j]) * as_float(pixel[j]) * powf(denominator(pixel, j, s), -s.beta - 1);
  });
  dx[i] = from_float<T>(as_float(grad[c]) * powf(denominator(pixel, c, s), -s.beta) -
                        2 * s.alpha * s.beta * as_float(pixel[c]) * sum);
}

OpState forward(const LrnOptions& options, const Tensor& x, Tensor& y) {
  const LrnShape shape = shape_of(options, x);
  by_type(x, [&]<class T>(T) {
    launch_each(shape.elements, lrn_forward_kernel<T>, x.as<T>(), y.as<T>(), shape);
  });
  return nullptr;
}

void backward(const LrnOptions& options, const OpState&, const Tensor& x, const Tensor& dy, Tensor& dx) {
  const LrnShape shape = shape_of(options, x);
  by_type(x, [&]<class T>(T) {
    launch_each(shape.elements, lrn_backward_kernel<T>, x.as<T>(), dy.as<T>(), dx.as<T>(), shape);
  });
}

const bool registered = add_cuda_kernels<LrnKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
