#pragma once
// Connectionist temporal classification (Graves, Fernández, Gomez, Schmidhuber, ICML 2006): the likelihood of label
// sequences that are not aligned to the frames.

#include <cstdint>
#include <span>

#include "nn/ops/kernels.h"

namespace topknot {

// Of N sequences; all in the memory of the logits' device.
struct CtcTargets {
  std::span<const std::int32_t>
      labels;  // [N, longest]: of a sequence the first lengths[n]; classes, but not the blank
  std::span<const std::int32_t> lengths;  // [N], 0 to longest
  std::span<const std::int32_t> frames;   // [N], 1 to T: what lies behind them has no part
};

// The frames that an alignment takes at least: one per label, and a blank between equal neighbours.
std::int64_t ctc_frames_needed(std::span<const std::int32_t> labels);

// 1/N sum_n -log p(labels[n] | softmax(logits[n])), a scalar of shape [1]. logits: [T * N, classes], frame by frame: row
// t * N + n. On a CPU, targets that are out of range or longer than their frames allow throw Error. On a GPU, where the
// host does not read them, they make the loss and the sequence's gradient NaN; the targets outlive the backward pass.
Variable ctc_loss(const Variable& logits, const CtcTargets& targets, std::int32_t blank = 0);

struct CtcKernels {
  static constexpr const char* op = "ctc_loss";
  // `dz`, where defined: sum_n d(-log p)/dlogits, f32, of the logits' shape.
  void (*forward)(const Tensor& logits, const CtcTargets& targets, std::int32_t blank, Tensor& loss,
                  Tensor& dz);
  // out = dz grad[0] / sequences
  void (*backward)(const Tensor& dz, std::int64_t sequences, const Tensor& grad, Tensor& out);
};

}  // namespace topknot
