#pragma once
// Batches where the model computes: what a loader gives, in the memory of the run's device.

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "data/loader.h"
#include "nn/base/check.h"
#include "nn/core/autograd.h"
#include "nn/layers/layers.h"

namespace topknot {

// A batch in the memory of the device that computes with it.
struct BatchView {
  Tensor images;  // [b, C, H, W]; on a GPU an activation: nhwc, or [b, features]; tokens stay f32
  std::span<const std::int32_t> labels;  // as Batch::labels
  Tensor targets;                        // regression, else undefined
  // Transcription: of each recording the number of its labels, and of the frames that the model gives.
  std::span<const std::int32_t> lengths, frames;
  std::int64_t losses = 0;      // as Batch::losses()
  const Batch* host = nullptr;  // transcription: labels and lengths on the host
};
// A loader's batch on a CPU; `frames`: output_frames(). It must outlive the view.
BatchView view_of(const Batch& batch, std::span<const std::int32_t> frames);

// The model's output frames of each recording in a batch.
std::vector<std::int32_t> output_frames(const Module& module, const Batch& batch);

// The loss of a model's output, a scalar: softmax cross-entropy with labels, mean squared error with targets,
// connectionist temporal classification with recordings. A run asks BuiltModel::loss() (train/setup.h).
Variable batch_loss(const Variable& output, const BatchView& batch, double label_smoothing = 0);

// A loader's batches where the model computes.
class Batches {
 public:
  // Brings the loader's next batch to the memory of the run's device, as micro-batch `part` of a step; null
  // after the epoch's last one. The view stays at its place, its contents until the next batch of this part.
  using Bring = std::function<const BatchView*(Loader& loader, int part)>;

  // `ahead`: so many batches of a step are brought before it begins, those of a GPU at the same addresses in
  // every step; 0: each when it is asked for. The data set and what `bring` refers to must outlive them.
  Batches(const Dataset& dataset, const LoaderOptions& options, Bring bring, int ahead = 0)
      : loader_(dataset, options), bring_(std::move(bring)), step_(static_cast<std::size_t>(ahead)) {}

  const Loader& loader() const { return loader_; }
  std::int64_t enter_epoch(std::int64_t epoch, const std::vector<Dealt>& dealt) {
    return loader_.enter_epoch(epoch, dealt);
  }
  void start_epoch(std::int64_t epoch, std::int64_t first_batch = 0) {
    loader_.start_epoch(epoch, first_batch);
  }
  // Waits until the next batch is there, or for a stop signal; returns at once if batches come ahead.
  void await() {
    if (step_.empty()) loader_.await_batch();
  }
  // Brings those of the batches that come ahead; on a GPU only.
  void begin_step(int parts) {
    if (step_.empty()) return;
    for (int part = 0; part < parts; ++part) step_[static_cast<std::size_t>(part)] = bring(part);
  }
  // Micro-batch `part` of the step under way, valid until its end or the next part.
  const BatchView& of_step(int part) {
    return step_.empty() ? *bring(part) : *step_[static_cast<std::size_t>(part)];
  }
  // The next batch of an evaluation, valid until the one after it; null after the last one.
  const BatchView* next() { return bring_(loader_, 0); }

 private:
  const BatchView* bring(int part) {
    const BatchView* batch = bring_(loader_, part);
    TOPKNOT_CHECK(batch, "an epoch has fewer batches than its steps");
    return batch;
  }

  Loader loader_;
  const Bring bring_;
  std::vector<const BatchView*> step_;  // those that came ahead, by part
};

// Leaves a batch in the loader's memory. The model must outlive it.
Batches::Bring in_host_memory(const Module& model);

}  // namespace topknot
