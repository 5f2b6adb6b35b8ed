#pragma once
// Losses: a scalar variable of shape [1], the mean over the batch. Padded sequences mask what is no part of them: here by
// labels, and by numbers of frames in nn/ops/ctc_loss.h.

#include <cstdint>
#include <span>

#include "nn/core/label.h"
#include "nn/ops/kernels.h"

namespace topknot {

// mean_n -sum_c t_c log softmax(logits[n])[c], where t is 1 for labels[n] and 0 else, or with `smoothing` e, in [0, 1), 1 - e +
// e / classes and e / classes (Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7; PyTorch's
// label_smoothing); 0 where all rows are masked. logits: [N, classes]; labels in [0, classes) or kNoLabel, in the memory of the logits'
// device. On a CPU another label throws Error and the labels are copied. On a GPU, where the host does not read them,
// another label makes the loss and its row's gradient NaN, and the labels outlive the backward pass.
Variable softmax_cross_entropy(const Variable& logits, std::span<const std::int32_t> labels,
                               float smoothing = 0);

// mean over all elements of (y - target)^2; both [N, D] in plain layout on one device, the target f32.
Variable mean_squared_error(const Variable& y, const Tensor& target);

// *sum += the rows of logits [N, classes] whose label is among the `top` greatest classes, of equal ones the first; a NaN is
// greater than a number, and a label whose own logit is a NaN comes last. Labels as above (on a GPU another one is never
// found), and `sum` in the memory of the logits' device.
void count_correct(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum);

struct CrossEntropyKernels {
  static constexpr const char* op = "softmax_cross_entropy";
  static constexpr bool cpu_bfloat16 = true;
  OpState (*forward)(const Tensor& logits, std::span<const std::int32_t> labels, float smoothing,
                     Tensor& loss);
  // dz = (softmax(z) - t) grad[0] / rows that are not masked
  void (*backward)(const Tensor& logits, const OpState& state, float smoothing, const Tensor& grad,
                   Tensor& dz);
  void (*count_correct)(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum);
};

struct SquaredErrorKernels {
  static constexpr const char* op = "mean_squared_error";
  void (*forward)(const Tensor& y, const Tensor& target, Tensor& loss);
  // dy = (y - target) 2 grad[0] / numel
  void (*backward)(const Tensor& y, const Tensor& target, const Tensor& grad, Tensor& dy);
};

}  // namespace topknot
