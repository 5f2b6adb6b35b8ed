#pragma once
// Lookahead convolution (Wang, Yogatama, Coates, Han, Hannun, Xiao, "Lookahead convolution layer for unidirectional
// recurrent neural networks", ICLR workshop 2016; Deep Speech 2, section 3.5): each feature of a frame is a weighted sum of
// its own and of the next frames'.
//
//   y[t,n,f] = sum_{j < taps, t+j < T} w[f,j] x[t+j,n,f]

#include "nn/ops/kernels.h"

namespace topknot {

// x: [T * batch, features], frame by frame: row t * batch + n; weight: [features, taps]; the value has x's shape.
Variable lookahead(const Variable& x, std::int64_t batch, const Variable& weight);

struct LookaheadKernels {
  static constexpr const char* op = "lookahead";
  // y[row] = sum_j w[:,j] x[row + j * shift], of the rows that there are: shift is the batch for y, minus that for dx from dy.
  void (*filter)(const Tensor& x, const Tensor& weight, std::int64_t shift, Tensor& y);
  // dw[f,j] = sum_row dy[row,f] x[row + j * batch, f]
  void (*weight_gradient)(const Tensor& x, const Tensor& dy, std::int64_t batch, Tensor& dw);
};

}  // namespace topknot
