#pragma once
// The commit of u and of a velocity at the end of a step (compress/memory/cuda/device_memory.h).

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "nn/core/step.h"

namespace topknot::cuda {

struct MemoryCommit {
  const StepStatus* status = nullptr;
  std::size_t n = 0;
  float* u = nullptr;
  const float* residual = nullptr;      // the old one
  const float* old_velocity = nullptr;  // null without momentum
  float* velocity = nullptr;            // this step's
  bool masking = false;                 // what was sent loses its velocity
  std::uint32_t* current = nullptr;     // becomes `written`; null without momentum
  std::uint32_t written = 0;
  // What was sent; `count` of at most `capacity`.
  const std::uint32_t* positions = nullptr;
  const float* values = nullptr;
  const std::uint32_t* count = nullptr;
  std::size_t capacity = 0;
};

void commit_memory(cudaStream_t stream, const MemoryCommit& step);

}  // namespace topknot::cuda
