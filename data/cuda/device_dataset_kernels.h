#pragma once
// The kernel that makes a batch.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "nn/core/rng.h"

namespace topknot::cuda {

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

struct BatchMemory {
  const std::int32_t* indices;  // null: all samples, in order
  std::uint32_t n;
  void* images;
  bool bf16;
  bool nhwc;  // else N, C, H, W
  std::int32_t* labels;
  float* targets;
};

// `rng`: the stream of augmentation; epoch and sample take the place of its a and b. epoch may be null: 0.
void make_batch_images(cudaStream_t stream, const StoredSamples& stored, const BatchMemory& batch,
                       bool augment, const PhiloxStream& rng, const std::uint32_t* epoch);

}  // namespace topknot::cuda
