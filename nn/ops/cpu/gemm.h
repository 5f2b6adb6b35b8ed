#pragma once
// Products of row-major matrices by oneDNN's sgemm, on the calling rank's threads, and the gradient of a bias.

#include <cstdint>

#include "nn/core/autograd.h"

namespace topknot {

// c (m x n) = op(a) op(b) + beta c, row-major and contiguous, where op transposes if asked.
void matmul(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k,
            const float* a, const float* b, float beta, float* c);

// The sum of dy [rows, out] over its rows, to the target.
void bias_gradient(const Tensor& dy, const GradientTarget& target);

}  // namespace topknot
