#include "nn/ops/ctc_loss.h"

#include <fmt/format.h>

#include "nn/ops/layout.h"

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

}  // namespace topknot
