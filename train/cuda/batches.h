#pragma once
// Batches in GPU memory, at the same addresses in every step, for graphs. Either the whole data set lies on the
// GPU and a kernel makes a batch of it (data.on_device), or the loader's batches are copied there while the GPU
// works on what it has.

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "data/cuda/device_dataset.h"
#include "nn/core/cuda/context.h"
#include "train/batches.h"
#include "train/config/config.h"

namespace topknot::cuda {

class CudaBatches final : public Batches {
 public:
  // For training with `parts` batches per step, or for evaluation. Data set, model and context must outlive it.
  CudaBatches(const Config& config, const Dataset& dataset, const Module& model, bool train, int rank,
              int ranks, int parts);

  const Loader& loader() const override { return loader_; }
  void start_epoch(std::int64_t epoch, std::int64_t first_batch) override;
  void begin_step();  // brings the step's batches
  const BatchView& of_step(int part) override { return batches_[static_cast<std::size_t>(part)].view; }
  const BatchView* next() override { return bring(0) ? &of_step(0) : nullptr; }

 private:
  struct DeviceBatch {
    BatchView view;  // of what follows
    DeviceArray<std::int32_t> labels, lengths, frames;
    Batch host;  // transcription: the batch that they came from, without its images
    std::int64_t size = 0;
  };
  // A batch on its way: page-locked memory, its copy on the GPU, and when that has come and been read.
  struct Staging {
    std::unique_ptr<PinnedMemory> memory;
    DeviceArray<std::byte> device;
    Event arrived, read;
  };
  // The next one, of at least `bytes`, which nothing reads any more.
  Staging& staging(std::size_t bytes);
  // Copies the first `bytes` by the stream of copies, and lets the compute stream wait for them.
  void send(Staging& staging, std::size_t bytes);
  // The next batch into the memory of this part of a step, on the context's stream; false after the last one.
  bool bring(int part);
  void shape(DeviceBatch& batch, const Batch& from);
  void copy(const Batch& from, DeviceBatch& to);
  // Of this set's pictures, [n, C, H, W] on the GPU.
  void normalise(const std::byte* bytes, Tensor& images);
  void make(const Batch& from, DeviceBatch& to);

  const Dataset& dataset_;
  const Module& model_;
  std::unique_ptr<DeviceDataset> data_;  // null: batches come from the loader
  Loader loader_;
  DeviceArray<std::uint32_t> epoch_{1};
  std::vector<DeviceBatch> batches_;  // one per part
  DeviceArray<float> statistics_;     // of the channels, where batches come as bytes
  Stream copies_;                     // beside the steps
  std::deque<Staging> staging_;       // used in turn; a step's batches at least
  std::size_t next_staging_ = 0;
};

}  // namespace topknot::cuda
