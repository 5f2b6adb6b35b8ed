#pragma once
// Fully connected layer: y = x W^T + b.

#include "nn/ops/kernels.h"

namespace topknot {

// x: [N, in]; weight: [out, in]; bias: [out] or undefined; y: [N, out].
Variable linear(const Variable& x, const Variable& weight, const Variable& bias);

struct LinearKernels {
  static constexpr const char* op = "linear";
  static constexpr bool cpu_bfloat16 = true;
  OpState (*forward)(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y);
  // dW = dy^T x;  dx = dy W;  db = sum_n dy
  void (*backward)(const Tensor& x, const Tensor& weight, const Tensor& dy, const OpState& state,
                   WeightedGradients& out);
};

}  // namespace topknot
