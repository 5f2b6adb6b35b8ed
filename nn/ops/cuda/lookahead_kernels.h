#pragma once
// Kernels of lookahead. Activations are float or, with bf16, bfloat16; sums are in float, weight gradients in double.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace topknot::cuda {

struct LookaheadShape {
  std::int64_t rows, features, taps;
  bool bf16;
};

// y[row,f] = sum_j w[f,j] x[row + j * shift, f], of the rows that there are
void lookahead_filter(cudaStream_t stream, const LookaheadShape& shape, const void* x, const float* w,
                      std::int64_t shift, void* y);
// dw[f,j] = sum_row dy[row,f] x[row + j * batch, f]
void lookahead_weight_gradient(cudaStream_t stream, const LookaheadShape& shape, const void* x,
                               const void* dy, std::int64_t batch, float* dw);

}  // namespace topknot::cuda
