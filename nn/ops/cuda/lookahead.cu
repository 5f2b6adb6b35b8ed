// Activations are float or bfloat16; sums are in float, weight gradients in double.
#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

struct LookaheadShape {
  std::int64_t rows, features, taps;
};

LookaheadShape shape_of(const Tensor& x, const Tensor& weight) {
  return {x.dim(0), weight.dim(0), weight.dim(1)};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    lookahead_filter_kernel(LookaheadShape s, const T* x, const float* w, std::int64_t shift, T* y) {
  const std::int64_t i = awaited_index<std::int64_t>();
  if (i >= s.rows * s.features) return;
  const std::int64_t row = i / s.features, f = i % s.features;
  float sum = 0;
  for (std::int64_t j = 0; j < s.taps; ++j) {
    const std::int64_t from = row + j * shift;
    if (from < 0 || from >= s.rows) break;
    sum += w[f * s.taps + j] * as_float(x[from * s.features + f]);
  }
  y[i] = from_float<T>(sum);
}

void filter(const Tensor& x, const Tensor& weight, std::int64_t shift, Tensor& y) {
  const LookaheadShape s = shape_of(x, weight);
  by_type(x, [&]<class T>(T) {
    launch_each(static_cast<std::size_t>(s.rows * s.features), lookahead_filter_kernel<T>, s, x.as<T>(),
                weight.data(), shift, y.as<T>());
  });
}

// A thread per weight, neighbours of one tap: they read neighbours of a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    lookahead_weight_kernel(LookaheadShape s, const T* x, const T* dy, std::int64_t batch, float* dw) {
  const std::int64_t i = awaited_index<std::int64_t>();
  if (i >= s.features * s.taps) return;
  const std::int64_t j = i / s.features, f = i % s.features;
  double sum = 0;
  for (std::int64_t row = 0; row + j * batch < s.rows; ++row)
    sum += static_cast<double>(as_float(dy[row * s.features + f])) *
           static_cast<double>(as_float(x[(row + j * batch) * s.features + f]));
  dw[f * s.taps + j] = static_cast<float>(sum);
}

void weight_gradient(const Tensor& x, const Tensor& dy, std::int64_t batch, Tensor& dw) {
  const LookaheadShape s = shape_of(x, dw);
  by_type(x, [&]<class T>(T) {
    launch_each(static_cast<std::size_t>(s.features * s.taps), lookahead_weight_kernel<T>, s, x.as<T>(),
                dy.as<T>(), batch, dw.data());
  });
}

const bool registered =
    add_cuda_kernels<LookaheadKernels>({.filter = filter, .weight_gradient = weight_gradient});

}  // namespace
}  // namespace topknot::cuda
