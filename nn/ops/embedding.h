#pragma once
// Embedding: a row of the weight for each token of a batch of sequences.

#include "nn/ops/kernels.h"

namespace topknot {

// ids: [batch, steps, 1, 1], f32 that hold integers from 0 to tokens - 1; weight: [tokens, width]. The value has the rows
// step by step, [steps * batch, width]: row t * batch + b is that of sequence b at step t. On a CPU an id beyond the
// weight throws Error. On a GPU, where the host does not read them, its row is NaN.
Variable embedding(const Variable& ids, const Variable& weight);

struct EmbeddingKernels {
  static constexpr const char* op = "embedding";
  Tensor (*forward)(const Tensor& ids, const Tensor& weight);
  // dW[id] = sum of dy over the rows with this id, in their order, and 0 where there is none. The gradient is dense.
  void (*backward)(const Tensor& ids, const Tensor& dy, std::int64_t tokens, const GradientTarget& weight);
};

}  // namespace topknot
