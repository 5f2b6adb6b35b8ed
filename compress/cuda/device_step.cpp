#include "compress/cuda/device_step.h"

#include <cstring>

#include "nn/base/check.h"

namespace topknot::cuda {

static_assert(sizeof(StepParameters) <= 64 && sizeof(StepStatus) <= 64);

DeviceStep::DeviceStep(int ranks)
    : ranks_(ranks), memory_(kWeights + static_cast<std::size_t>(ranks) * sizeof(float)) {
  for (Slot& slot : slots_) slot.memory = std::make_unique<PinnedMemory>(memory_.size());
}

DeviceStep::~DeviceStep() {
  // Page-locked memory is given back only when the GPU has read it; after a failure the GPU may stand still
  // for good, and waiting for it here would keep the rank from ending.
  for (Slot& slot : slots_)
    if (cudaEventQuery(slot.copied.get()) != cudaSuccess) static_cast<void>(slot.memory.release());
  cudaGetLastError();
}

template <class Fill>
void DeviceStep::copy(cudaStream_t stream, std::size_t begin, std::size_t end, Fill fill) {
  Slot& slot = slots_[next_++ % kSlots];
  slot.copied.synchronize();
  fill(slot.memory->data());
  TOPKNOT_CUDA(cudaMemcpyAsync(memory_.data() + begin, slot.memory->data() + begin, end - begin,
                               cudaMemcpyHostToDevice, stream));
  slot.copied.record(stream);
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
