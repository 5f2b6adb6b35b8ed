#pragma once
// Fully connected layer: y = x W^T + b.

#include "nn/core/autograd.h"

namespace topknot {

// x: [N, in]; weight: [out, in]; bias: [out] or undefined; y: [N, out].
Variable linear(const Variable& x, const Variable& weight, const Variable& bias);

// c (m x n) = op(a) op(b) + beta c, row-major, where op transposes if asked. oneDNN's sgemm.
void matmul(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k,
            const float* a, const float* b, float beta, float* c);

}  // namespace topknot
