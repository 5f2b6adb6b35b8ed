#pragma once
// Losses: a scalar variable of shape [1], the mean over the batch.

#include <cstdint>
#include <span>

#include "nn/core/autograd.h"

namespace topknot {

// mean_n -log softmax(logits[n])[labels[n]]; logits: [N, classes]; labels in [0, classes).
Variable softmax_cross_entropy(const Variable& logits, std::span<const std::int32_t> labels);

// mean over all elements of (y - target)^2; both [N, D].
Variable mean_squared_error(const Variable& y, const Tensor& target);

}  // namespace topknot
