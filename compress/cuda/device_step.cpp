#include "compress/cuda/device_step.h"

#include <algorithm>
#include <cstring>

#include "nn/base/check.h"

namespace topknot::cuda {

static_assert(sizeof(StepParameters) <= 64 && sizeof(StepStatus) <= 64);

DeviceStep::DeviceStep(int ranks)
    : ranks_(ranks),
      memory_(kWeights + static_cast<std::size_t>(ranks) * sizeof(float)),
      slots_(std::make_unique<PinnedMemory>(kSlots * memory_.size())) {}

DeviceStep::~DeviceStep() {
  // Page-locked memory is given back only when the GPU has read it; after a failure the GPU may stand still
  // for good, and waiting for it here would keep the rank from ending.
  if (std::any_of(copied_.begin(), copied_.end(),
                  [](const Event& event) { return cudaEventQuery(event.get()) != cudaSuccess; }))
    static_cast<void>(slots_.release());
  cudaGetLastError();
}

void DeviceStep::copy(cudaStream_t stream, std::size_t begin, std::size_t end, auto fill) {
  const std::size_t slot = next_++ % kSlots;
  std::byte* const from = slots_->data() + slot * memory_.size();
  copied_[slot].synchronize();
  fill(from);
  TOPKNOT_CUDA(
      cudaMemcpyAsync(memory_.data() + begin, from + begin, end - begin, cudaMemcpyHostToDevice, stream));
  copied_[slot].record(stream);
}

void DeviceStep::begin(cudaStream_t stream, const StepContext& context) {
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

void DeviceStep::set_status(cudaStream_t stream, const StepStatus& status) {
  copy(stream, kStatus, kStatus + sizeof status,
       [&](std::byte* to) { std::memcpy(to + kStatus, &status, sizeof status); });
}

}  // namespace topknot::cuda
