#pragma once
// Parameters and status of a step in GPU memory that keeps its place, so that graphs may hold it. The host writes it
// without waiting for the GPU.

#include <array>
#include <memory>
#include <span>

#include "nn/core/cuda/context.h"
#include "nn/core/step.h"

namespace topknot::cuda {

class DeviceStep {
 public:
  // On the current context's GPU.
  explicit DeviceStep(int ranks);
  ~DeviceStep();
  DeviceStep(const DeviceStep&) = delete;
  DeviceStep& operator=(const DeviceStep&) = delete;

  // In the stream's order. `weights`: one per rank. Clears the status.
  void begin(cudaStream_t stream, const StepParameters& parameters, std::span<const float> weights);
  void set_status(cudaStream_t stream, const StepStatus& status);

  // GPU memory.
  StepParameters* parameters() const { return reinterpret_cast<StepParameters*>(memory_.data()); }
  StepStatus* status() const { return reinterpret_cast<StepStatus*>(memory_.data() + kStatus); }
  const float* weights() const { return reinterpret_cast<const float*>(memory_.data() + kWeights); }

 private:
  static constexpr std::size_t kStatus = 64, kWeights = 128;  // bytes from the start
  static constexpr std::size_t kSlots = 16;
  struct Slot {
    std::unique_ptr<PinnedMemory> memory;
    Event copied;
  };
  // Copies bytes [begin, end) of the next slot, which `fill` writes to.
  template <class Fill>
  void copy(cudaStream_t stream, std::size_t begin, std::size_t end, Fill fill);

  int ranks_;
  DeviceArray<std::byte> memory_;
  std::array<Slot, kSlots> slots_;  // the host may be that many copies ahead of the GPU
  std::size_t next_ = 0;
};

}  // namespace topknot::cuda
