#include "train/batches.h"

#include <memory>

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

Batches::Bring in_host_memory(const Module& model) {
  struct Current {
    Batch batch;
    std::vector<std::int32_t> frames;
    BatchView view;
  };
  return [&model, current = std::make_shared<Current>()](Loader& loader, int) -> const BatchView* {
    auto& [batch, frames, view] = *current;
    batch = {}, view = {};  // their memory goes before that of the next batch comes
    if (!loader.next(batch)) return nullptr;
    frames = output_frames(model, batch);
    return &(view = view_of(batch, frames));
  };
}

}  // namespace topknot
