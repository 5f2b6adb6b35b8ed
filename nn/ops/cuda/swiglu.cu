// nn/ops/swiglu.cpp, a thread per element of y: neighbours read neighbours of a and of b. Bound by memory.
#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const T* x, std::size_t n, std::size_t width, T* y) {
  const std::size_t i = awaited_index();
  if (i >= n) return;
  const std::size_t a = i + i / width * width;  // row * 2 width + column
  y[i] = from_float<T>(SiluRule{}.value(as_float(x[a])) * as_float(x[a + width]));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const T* x, const T* dy, std::size_t n, std::size_t width, T* dx) {
  const std::size_t i = awaited_index();
  if (i >= n) return;
  const std::size_t a = i + i / width * width;
  const float of_a = as_float(x[a]), g = as_float(dy[i]);
  dx[a] = from_float<T>(g * as_float(x[a + width]) * SiluRule{}.slope(of_a));
  dx[a + width] = from_float<T>(g * SiluRule{}.value(of_a));
}

void forward(const Tensor& x, Tensor& y) {
  by_type(x, [&]<class T>(T) {
    launch_each(elements(y), swiglu_kernel<T>, x.as<T>(), elements(y), static_cast<std::size_t>(y.dim(1)),
                y.as<T>());
  });
}

void backward(const Tensor& x, const Tensor& dy, Tensor& dx) {
  by_type(x, [&]<class T>(T) {
    launch_each(elements(dy), swiglu_backward_kernel<T>, x.as<T>(), dy.as<T>(), elements(dy),
                static_cast<std::size_t>(dy.dim(1)), dx.as<T>());
  });
}

const bool registered = add_cuda_kernels<SwigluKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
