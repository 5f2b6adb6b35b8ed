#include "train/batches.h"

#include "nn/base/check.h"
#include "nn/ops/ops.h"

namespace topknot {

BatchView view_of(const Batch& batch, std::span<const std::int32_t> frames) {
  return {batch.images, batch.labels, batch.targets, batch.lengths, frames, batch.losses(), &batch};
}

std::vector<std::int32_t> output_frames(const Module& module, const Batch& batch) {
  std::vector<std::int32_t> frames;
  for (const std::int32_t of : batch.frames)
    frames.push_back(static_cast<std::int32_t>(module.output_frames(of)));
  return frames;
}

Variable batch_loss(const Variable& output, const BatchView& batch, double label_smoothing) {
  if (!batch.frames.empty()) return ctc_loss(output, {batch.labels, batch.lengths, batch.frames});
  return batch.targets.defined()
             ? mean_squared_error(output, batch.targets)
             : softmax_cross_entropy(output, batch.labels, static_cast<float>(label_smoothing));
}

const BatchView& HostBatches::of_step(int) {
  const BatchView* batch = next();
  TOPKNOT_CHECK(batch, "an epoch has fewer batches than its steps");
  return *batch;
}

const BatchView* HostBatches::next() {
  batch_ = {}, view_ = {};
  if (!loader_.next(batch_)) return nullptr;
  frames_ = output_frames(model_, batch_);
  view_ = view_of(batch_, frames_);
  return &view_;
}

}  // namespace topknot
