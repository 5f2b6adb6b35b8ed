#pragma once
// Products of row-major matrices by oneDNN on the calling rank's threads, in fp32 or of bfloat16 operands, and the gradient
// of a bias.

#include <cstdint>

#include "nn/core/autograd.h"

namespace topknot {

// c (m x n, f32) = op(a) op(b) + beta c, beta 0 or 1, row-major and contiguous, where op transposes if asked. `type` is that of
// both operands.
void matmul(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, DType type,
            const void* a, const void* b, float beta, float* c);

// The sum of dy [rows, out] over its rows, to the target.
void bias_gradient(const Tensor& dy, const GradientTarget& target);

}  // namespace topknot
