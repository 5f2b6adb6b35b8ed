#pragma once
// A step's input and results (nn/core/step.h) in GPU memory.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "compress/compressor.h"
#include "nn/core/cuda/context.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// Parameters, status and weights of a step in GPU memory that keeps its place, so that graphs may hold it.
// The host writes it without waiting for the GPU.
class DeviceStep {
 public:
  // On the current context's GPU.
  explicit DeviceStep(int ranks)
      : ranks_(ranks),
        memory_(kWeights + static_cast<std::size_t>(ranks) * sizeof(float)),
        slots_(std::make_unique<PinnedMemory>(kSlots * memory_.size())) {}
  ~DeviceStep() {
    // Page-locked memory is given back only when the GPU has read it; after a failure the GPU may stand still
    // for good, and waiting for it here would keep the rank from ending.
    if (std::any_of(copied_.begin(), copied_.end(),
                    [](const Event& event) { return cudaEventQuery(event.get()) != cudaSuccess; }))
      static_cast<void>(slots_.release());
    cudaGetLastError();
  }

  // In the stream's order. Clears the status. `context`: the host's, with a weight for each rank.
  void begin(cudaStream_t stream, const StepContext& context) {
    TOPKNOT_CHECK(context.weights.size() == static_cast<std::size_t>(ranks_),
                  "one aggregation weight per rank");
    const StepParameters parameters = parameters_of(context);
    copy(stream, 0, memory_.size(), [&](std::byte* to) {
      const StepStatus status;
      std::memcpy(to, &parameters, sizeof parameters);
      std::memcpy(to + kStatus, &status, sizeof status);
      std::memcpy(to + kWeights, context.weights.data(), context.weights.size_bytes());
    });
  }
  void set_status(cudaStream_t stream, const StepStatus& status) {
    copy(stream, kStatus, kStatus + sizeof status,
         [&](std::byte* to) { std::memcpy(to + kStatus, &status, sizeof status); });
  }

  // GPU memory.
  StepParameters* parameters() const { return reinterpret_cast<StepParameters*>(memory_.data()); }
  StepStatus* status() const { return reinterpret_cast<StepStatus*>(memory_.data() + kStatus); }
  const float* weights() const { return reinterpret_cast<const float*>(memory_.data() + kWeights); }

 private:
  static constexpr std::size_t kStatus = 64, kWeights = 128;  // bytes from the start
  static_assert(sizeof(StepParameters) <= kStatus && sizeof(StepStatus) <= kWeights - kStatus);
  static constexpr std::size_t kSlots = 16;
  // Copies bytes [begin, end) of the next slot, which `fill` writes to.
  void copy(cudaStream_t stream, std::size_t begin, std::size_t end, auto fill) {
    const std::size_t slot = next_++ % kSlots;
    std::byte* const from = slots_->data() + slot * memory_.size();
    copied_[slot].synchronize();
    fill(from);
    TOPKNOT_CUDA(
        cudaMemcpyAsync(memory_.data() + begin, from + begin, end - begin, cudaMemcpyHostToDevice, stream));
    copied_[slot].record(stream);
  }

  int ranks_;
  DeviceArray<std::byte> memory_;
  std::unique_ptr<PinnedMemory> slots_;  // the host may be that many copies ahead of the GPU
  std::array<Event, kSlots> copied_;
  std::size_t next_ = 0;
};

}  // namespace topknot::cuda
