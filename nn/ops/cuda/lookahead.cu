#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/lookahead_kernels.h"

namespace topknot::cuda {
namespace {

// A thread per element of y.
template <class T>
__global__ void __launch_bounds__(kThreads)
    lookahead_filter_kernel(LookaheadShape s, const T* x, const float* w, std::int64_t shift, T* y) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
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

// A thread per weight, neighbours of one tap: they read neighbours of a row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    lookahead_weight_kernel(LookaheadShape s, const T* x, const T* dy, std::int64_t batch, float* dw) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= s.features * s.taps) return;
  const std::int64_t j = i / s.features, f = i % s.features;
  double sum = 0;
  for (std::int64_t row = 0; row + j * batch < s.rows; ++row)
    sum += static_cast<double>(as_float(dy[row * s.features + f])) *
           static_cast<double>(as_float(x[(row + j * batch) * s.features + f]));
  dw[f * s.taps + j] = static_cast<float>(sum);
}

}  // namespace

void lookahead_filter(cudaStream_t stream, const LookaheadShape& s, const void* x, const float* w,
                      std::int64_t shift, void* y) {
  by_type(s.bf16, [&](auto type) {
    using T = decltype(type);
    launch(lookahead_filter_kernel<T>, grid_for(static_cast<std::size_t>(s.rows * s.features), kThreads),
           kThreads, stream, s, static_cast<const T*>(x), w, shift, static_cast<T*>(y));
  });
}
void lookahead_weight_gradient(cudaStream_t stream, const LookaheadShape& s, const void* x, const void* dy,
                               std::int64_t batch, float* dw) {
  by_type(s.bf16, [&](auto type) {
    using T = decltype(type);
    launch(lookahead_weight_kernel<T>, grid_for(static_cast<std::size_t>(s.features * s.taps), kThreads),
           kThreads, stream, s, static_cast<const T*>(x), static_cast<const T*>(dy), batch, dw);
  });
}

}  // namespace topknot::cuda
