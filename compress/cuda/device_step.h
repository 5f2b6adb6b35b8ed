#pragma once
// A step's input and results (nn/core/step.h) in GPU memory.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
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
  explicit DeviceStep(int ranks);
  ~DeviceStep();
  DeviceStep(const DeviceStep&) = delete;
  DeviceStep& operator=(const DeviceStep&) = delete;

  // In the stream's order. Clears the status. `context`: of the host, with as many weights as the constructor
  // was told.
  void begin(cudaStream_t stream, const StepContext& context);
  void set_status(cudaStream_t stream, const StepStatus& status);

  // GPU memory.
  StepParameters* parameters() const { return reinterpret_cast<StepParameters*>(memory_.data()); }
  StepStatus* status() const { return reinterpret_cast<StepStatus*>(memory_.data() + kStatus); }
  const float* weights() const { return reinterpret_cast<const float*>(memory_.data() + kWeights); }

 private:
  static constexpr std::size_t kStatus = 64, kWeights = 128;  // bytes from the start
  static constexpr std::size_t kSlots = 16;
  // Copies bytes [begin, end) of the next slot, which `fill` writes to.
  void copy(cudaStream_t stream, std::size_t begin, std::size_t end, auto fill);

  int ranks_;
  DeviceArray<std::byte> memory_;
  std::unique_ptr<PinnedMemory> slots_;  // the host may be that many copies ahead of the GPU
  std::array<Event, kSlots> copied_;
  std::size_t next_ = 0;
};

}  // namespace topknot::cuda
