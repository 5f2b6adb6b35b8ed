#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/lrn_kernels.h"

namespace topknot::cuda {
namespace {

// Calls fn(j) for the channels j around c.
template <class Fn>
__device__ void for_each_neighbour(const LrnShape& s, std::uint32_t c, const Fn& fn) {
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
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= s.elements) return;
  const std::uint32_t i = static_cast<std::uint32_t>(at), c = i % s.channels;
  y[i] = from_float<T>(as_float(x[i]) * powf(denominator(x + (i - c), c, s), -s.beta));
}

template <class T>
__global__ void __launch_bounds__(kThreads) lrn_backward_kernel(const T* x, const T* dy, T* dx, LrnShape s) {
  const std::size_t at = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
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

template <class T>
void lrn(cudaStream_t stream, const void* x, const void* dy, void* out, LrnShape s) {
  if (s.elements == 0) return;
  const dim3 grid = grid_for(s.elements, kThreads);
  if (dy)
    launch(lrn_backward_kernel<T>, grid, kThreads, stream, static_cast<const T*>(x),
           static_cast<const T*>(dy), static_cast<T*>(out), s);
  else
    launch(lrn_forward_kernel<T>, grid, kThreads, stream, static_cast<const T*>(x), static_cast<T*>(out), s);
}

}  // namespace

void lrn_forward(cudaStream_t stream, bool bf16, const void* x, void* y, LrnShape shape) {
  (bf16 ? lrn<__nv_bfloat16> : lrn<float>)(stream, x, nullptr, y, shape);
}
void lrn_backward(cudaStream_t stream, bool bf16, const void* x, const void* dy, void* dx, LrnShape shape) {
  (bf16 ? lrn<__nv_bfloat16> : lrn<float>)(stream, x, dy, dx, shape);
}

}  // namespace topknot::cuda
