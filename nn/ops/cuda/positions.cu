#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// A thread for each element: element i of row i / width, at step row / batch.
template <class T>
__global__ void __launch_bounds__(kThreads)
    positions_kernel(const T* x, const float* weight, std::size_t batch, std::size_t width, std::size_t n,
                     T* y) {
  const std::size_t i = awaited_index();
  if (i >= n) return;
  y[i] = from_float<T>(as_float(x[i]) + weight[i / width / batch * width + i % width]);
}

void forward(const Tensor& x, std::int64_t batch, const Tensor& weight, Tensor& y) {
  const std::size_t n = elements(x), width = static_cast<std::size_t>(x.dim(1));
  by_type(x, [&]<class T>(T) {
    launch_each(n, positions_kernel<T>, x.as<T>(), weight.data(), static_cast<std::size_t>(batch), width, n,
                y.as<T>());
  });
}

// A thread for each element of the weight: summed in the order of the batch, as on the CPU.
template <class T>
__global__ void __launch_bounds__(kThreads)
    positions_gradient_kernel(const T* dy, std::size_t batch, std::size_t width, std::size_t steps,
                              bool accumulate, std::size_t n, float* dw) {
  const std::size_t i = awaited_index();
  if (i >= n) return;
  const std::size_t t = i / width, j = i % width;
  float sum = accumulate ? dw[i] : 0.0f;
  if (t < steps)
    for (std::size_t b = 0; b < batch; ++b) sum += as_float(dy[(t * batch + b) * width + j]);
  dw[i] = sum;
}

void weight_gradient(const Tensor& dy, std::int64_t batch, std::int64_t positions,
                     const GradientTarget& weight) {
  const std::size_t width = static_cast<std::size_t>(dy.dim(1)),
                    n = static_cast<std::size_t>(positions) * width;
  by_type(dy, [&]<class T>(T) {
    launch_each(n, positions_gradient_kernel<T>, dy.as<T>(), static_cast<std::size_t>(batch), width,
                static_cast<std::size_t>(dy.dim(0) / batch), weight.accumulate, n, weight.data);
  });
}

const bool registered =
    add_cuda_kernels<PositionsKernels>({.forward = forward, .weight_gradient = weight_gradient});

}  // namespace
}  // namespace topknot::cuda
