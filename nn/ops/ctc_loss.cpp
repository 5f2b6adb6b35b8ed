#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/ctc_rule.h"
#include "nn/ops/kernels.h"

namespace topknot {

std::int64_t ctc_frames_needed(std::span<const std::int32_t> labels) {
  auto frames = static_cast<std::int64_t>(labels.size());
  for (std::size_t i = 1; i < labels.size(); ++i) frames += labels[i] == labels[i - 1];
  return frames;
}

Variable ctc_loss(const Variable& logits, const CtcTargets& targets, std::int32_t blank) {
  const Tensor& in = logits.value();
  const auto sequences = static_cast<std::int64_t>(targets.lengths.size());
  TOPKNOT_CHECK(in.shape().rank() == 2 && in.numel() > 0 && sequences > 0 && in.dim(0) % sequences == 0 &&
                    targets.frames.size() == targets.lengths.size() &&
                    static_cast<std::int64_t>(targets.labels.size()) % sequences == 0,
                fmt::format("ctc_loss: logits {} for {} sequences of {} labels in all", in.shape().str(),
                            sequences, targets.labels.size()));
  TOPKNOT_CHECK(blank >= 0 && blank < in.dim(1),
                fmt::format("ctc_loss: blank {} of {} classes", blank, in.dim(1)));
  if (needs_f32(logits)) return ctc_loss(cast(logits, DType::f32), targets, blank);
  const auto& kernels = kernels_for<CtcKernels>(logits);
  Tensor loss = Tensor::empty({1}, Layout::plain, in.device()), dz;
  if (logits.requires_grad()) dz = Tensor::empty(in.shape(), Layout::plain, in.device());
  kernels.forward(in, targets, blank, loss, dz);
  return {"ctc_loss", loss, {logits}, [=, &kernels](Tensor grad) {
            Tensor out = Tensor::empty_like(logits.value());
            kernels.backward(dz, sequences, grad, out);
            logits.accumulate_grad(std::move(out));
          }};
}

namespace {

// One sequence: frame t's logits are those of row t * stride + n.
struct CtcSequence {
  CtcStates states;
  std::int64_t frames, stride, row, classes;
  std::int64_t at(std::int64_t t) const { return (t * stride + row) * classes; }
};

CtcSequence ctc_sequence(const Tensor& logits, const CtcTargets& targets, std::int32_t blank,
                         std::int64_t n) {
  const auto i = static_cast<std::size_t>(n);
  const auto sequences = static_cast<std::int64_t>(targets.lengths.size());
  const std::int64_t longest = static_cast<std::int64_t>(targets.labels.size()) / sequences;
  const std::int64_t frames = targets.frames[i], length = targets.lengths[i];
  TOPKNOT_CHECK(frames >= 1 && frames <= logits.dim(0) / sequences && length >= 0 && length <= longest,
                fmt::format("ctc_loss: sequence {} has {} frames and {} labels, of {} and {}", n, frames,
                            length, logits.dim(0) / sequences, longest));
  const std::int32_t* labels = targets.labels.data() + n * longest;
  for (std::int64_t s = 0; s < length; ++s)
    TOPKNOT_CHECK(
        labels[s] >= 0 && labels[s] < logits.dim(1) && labels[s] != blank,
        fmt::format("ctc_loss: label {} of {} classes, {} the blank", labels[s], logits.dim(1), blank));
  const std::int64_t needed = ctc_frames_needed({labels, static_cast<std::size_t>(length)});
  TOPKNOT_CHECK(needed <= frames,
                fmt::format("ctc_loss: sequence {} has {} frames, and its {} labels take {}", n, frames,
                            length, needed));
  return {{labels, static_cast<std::int32_t>(length), blank}, frames, sequences, n, logits.dim(1)};
}

// -log p; the gradient goes to dz, unless that is null.
double ctc_of_sequence(const CtcSequence& q, const float* logits, float* dz) {
  const int size = q.states.size();
  const auto states = static_cast<std::size_t>(size);
  const auto frames = static_cast<std::size_t>(q.frames), classes = static_cast<std::size_t>(q.classes);
  std::vector<double> logs(frames * classes), alpha(frames * states);
  for (std::size_t t = 0; t < frames; ++t) {
    const float* z = logits + q.at(static_cast<std::int64_t>(t));
    const double top = *std::max_element(z, z + classes);
    double sum = 0;
    for (std::size_t c = 0; c < classes; ++c) sum += std::exp(z[c] - top);
    for (std::size_t c = 0; c < classes; ++c) logs[t * classes + c] = z[c] - top - std::log(sum);
    const double* before = t > 0 ? &alpha[(t - 1) * states] : nullptr;
    for (int s = 0; s < size; ++s)
      alpha[t * states + static_cast<std::size_t>(s)] =
          ctc_forward(q.states, s, before) + logs[t * classes + static_cast<std::size_t>(q.states.label(s))];
  }
  const double* last = &alpha[(frames - 1) * states];
  const double log_p = size > 1 ? log_add(last[size - 1], last[size - 2]) : last[0];
  if (!dz) return -log_p;
  // Equation 16, with endings that do not contain the frame's own label.
  std::vector<double> after(states), now(states), share(classes);
  for (std::size_t t = frames; t-- > 0;) {
    const double* own = &logs[t * classes];
    std::fill(share.begin(), share.end(), 0.0);
    for (int s = 0; s < size; ++s) {
      const auto label = static_cast<std::size_t>(q.states.label(s));
      const double beta = ctc_backward(q.states, s, t + 1 < frames ? after.data() : nullptr);
      share[label] += std::exp(alpha[t * states + static_cast<std::size_t>(s)] + beta - log_p);
      now[static_cast<std::size_t>(s)] = beta + own[label];
    }
    std::swap(after, now);
    float* d = dz + q.at(static_cast<std::int64_t>(t));
    for (std::size_t c = 0; c < classes; ++c) d[c] = static_cast<float>(std::exp(own[c]) - share[c]);
  }
  return -log_p;
}

void ctc_forward_pass(const Tensor& logits, const CtcTargets& targets, std::int32_t blank, Tensor& loss,
                      Tensor& dz) {
  const auto n = static_cast<std::int64_t>(targets.lengths.size());
  std::vector<double> losses(static_cast<std::size_t>(n));
  float* gradient = dz.defined() ? dz.data() : nullptr;
  if (gradient) std::fill(gradient, gradient + dz.numel(), 0.0f);  // after a sequence's frames
  parallel_each(n, [&](std::int64_t i) {
    losses[static_cast<std::size_t>(i)] =
        ctc_of_sequence(ctc_sequence(logits, targets, blank, i), logits.data(), gradient);
  });
  double sum = 0;
  for (const double value : losses) sum += value;
  loss.data()[0] = static_cast<float>(sum / static_cast<double>(n));
}

void ctc_backward_pass(const Tensor& dz, std::int64_t sequences, const Tensor& grad, Tensor& out) {
  const float scale = grad.data()[0] / static_cast<float>(sequences);
  for (std::int64_t i = 0; i < out.numel(); ++i) out.data()[i] = dz.data()[i] * scale;
}

const bool ctc_registered =
    add_cpu_kernels<CtcKernels>({.forward = ctc_forward_pass, .backward = ctc_backward_pass});

}  // namespace
}  // namespace topknot
