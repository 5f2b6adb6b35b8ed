#pragma once
// Batches where the model computes: what a loader gives, in the memory of the run's device.

#include <cstdint>
#include <span>
#include <vector>

#include "data/loader.h"
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

// Of each recording of a batch, the frames that the model gives.
std::vector<std::int32_t> output_frames(const Module& module, const Batch& batch);

// A batch's loss, a scalar: softmax cross-entropy with labels, mean squared error with targets, connectionist temporal
// classification with recordings.
Variable batch_loss(const Variable& output, const BatchView& batch, double label_smoothing = 0);

// A loader's batches on a device. The data set and the model must outlive them.
class Batches {
 public:
  virtual ~Batches() = default;
  virtual const Loader& loader() const = 0;
  virtual void start_epoch(std::int64_t epoch, std::int64_t first_batch = 0) = 0;
  // Waits until the next batch's data are there, or until a stop signal. On a GPU it returns at once.
  virtual void await() {}
  // Micro-batch `part` of the step under way, valid until its end or the next part. On a GPU a step's batches are there before
  // it begins, at the same addresses in every step.
  virtual const BatchView& of_step(int part) = 0;
  // The next batch of an evaluation, valid until the one after it; null after the last one.
  virtual const BatchView* next() = 0;
};

class HostBatches final : public Batches {
 public:
  HostBatches(const Dataset& dataset, const LoaderOptions& options, const Module& model)
      : loader_(dataset, options), model_(model) {}
  const Loader& loader() const override { return loader_; }
  void start_epoch(std::int64_t epoch, std::int64_t first_batch) override {
    loader_.start_epoch(epoch, first_batch);
  }
  void await() override { loader_.await_batch(); }
  const BatchView& of_step(int part) override;
  const BatchView* next() override;

 private:
  Loader loader_;
  const Module& model_;
  Batch batch_;
  std::vector<std::int32_t> frames_;
  BatchView view_;
};

}  // namespace topknot
