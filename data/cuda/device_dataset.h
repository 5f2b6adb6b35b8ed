#pragma once
// A data set in GPU memory, in whole, and batches made of it there: the loader's images (data/loader.h)
// without the host. Pictures stay bytes where the set keeps bytes, else floats.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "data/dataset.h"
#include "nn/core/cuda/context.h"
#include "nn/core/rng.h"

namespace topknot::cuda {

// The mean of each channel, then the standard deviations, in GPU memory; 0 and 1 if the set gives none.
DeviceArray<float> device_statistics(const Dataset& dataset);

class DeviceDataset {
 public:
  // Copies the set to the current context's GPU and waits for that; the set is not needed afterwards.
  // `augment` and `seed` as of Transform. Throws OutOfMemory, and UserError for 2^31 samples or more.
  DeviceDataset(const Dataset& dataset, bool augment, std::uint64_t seed);

  // Puts the making of a batch of n samples on the stream. All pointers are into GPU memory.
  //   indices  n of them, each in [0, size())
  //   epoch    a word, for the draws of augmentation; null: epoch 0
  //   images   of n samples, f32 or bf16: [n, C, H, W] in any order but blocked, or plain [n, C * H * W] in C, H, W
  //            order. In f32 they are the loader's bit for bit, in bf16 these rounded.
  //   labels   n of them, for classification; else not read
  //   targets  [n, targets], f32, for regression; else not read
  void make_batch(cudaStream_t stream, const std::int32_t* indices, std::int64_t n,
                  const std::uint32_t* epoch, Tensor& images, std::int32_t* labels, Tensor& targets) const;

  std::int64_t size() const { return size_; }
  const Shape& sample_shape() const { return shape_; }
  std::int64_t targets() const { return targets_count_; }  // values per sample; 0 for classification
  // of GPU memory
  std::size_t bytes() const {
    return samples_.bytes() + statistics_.bytes() + labels_.bytes() + targets_.bytes();
  }

 private:
  std::int64_t size_, targets_count_;
  Shape shape_;
  bool as_bytes_, augment_;
  std::uint64_t seed_;
  DeviceArray<std::uint8_t> samples_;  // N, H, W, C; bytes or floats
  DeviceArray<float> statistics_;      // the mean of each channel, then the standard deviations
  DeviceArray<std::int32_t> labels_;
  DeviceArray<float> targets_;
};

// Samples in GPU memory.
struct StoredSamples {
  const void* samples;  // N, H, W, C; channels_first: N, C, H, W
  bool as_bytes;        // else floats
  std::uint32_t channels, height, width;
  const float* statistics;     // channels means, channels standard deviations
  const std::int32_t* labels;  // null for regression
  const float* targets;        // null for classification
  std::uint32_t target_count;
  bool channels_first = false;
};

// A batch in GPU memory.
struct BatchMemory {
  const std::int32_t* indices;  // null: all samples, in order
  std::uint32_t n;
  void* images;
  bool bf16;
  bool nhwc;  // else N, C, H, W
  std::int32_t* labels;
  float* targets;
};

// Puts the making of a batch on the stream. `rng`: the stream of augmentation; epoch and sample take the
// place of its a and b. epoch may be null: 0.
void make_batch_images(cudaStream_t stream, const StoredSamples& stored, const BatchMemory& batch,
                       bool augment, const PhiloxStream& rng, const std::uint32_t* epoch);

}  // namespace topknot::cuda
