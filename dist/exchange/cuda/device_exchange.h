#pragma once
// The exchange (dist/exchange/exchange.h) of gradients in GPU memory: the same groups in the same order, without the
// host waiting for the GPU. Encoding, decoding and committing run on the compute stream, collectives on the
// communication stream. The outcome of a step is in step_state().status, in GPU memory: the optimizer reads it
// there, the host later. Averages, residuals and states are those of gradients in host memory, bit for bit.
//
// A method without kernels, and every method under dist.backend gloo, is staged: gradients are copied to the host,
// exchanged there as the host's are, and the averages copied back; the host then waits in communicate() and
// decode_and_commit().

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/comm/cuda/device_communicator.h"
#include "dist/exchange/bucket.h"
#include "dist/exchange/cuda/device_times.h"
#include "dist/exchange/exchange.h"
#include "dist/exchange/transport.h"
#include "nn/core/cuda/context.h"
#include "nn/core/parameter.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// Parameters, status and weights of a step in GPU memory that keeps its place, so that graphs may hold it. The host writes
// it without waiting for the GPU.
class DeviceStep {
 public:
  // On the current context's GPU.
  explicit DeviceStep(int ranks);
  ~DeviceStep();
  DeviceStep(const DeviceStep&) = delete;
  DeviceStep& operator=(const DeviceStep&) = delete;

  // In the stream's order. Clears the status. `context`: of the host, with as many weights as the constructor was told.
  void begin(cudaStream_t stream, const StepContext& context);
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

class DeviceExchange final : public Exchange {
 public:
  // `times`: the transport's.
  DeviceExchange(ParameterArena& arena, std::vector<Group> groups, std::unique_ptr<Transport> transport,
                 DeviceTimes& times, const MakeBucket& make_bucket)
      : Exchange(arena, std::move(groups), std::move(transport), make_bucket), times_(times) {}
  // Where the pieces of its steps are marked, once it is on: at most seven for each group, and two more.
  DeviceTimes& times() { return times_; }
  std::size_t most_marks() const { return 7 * groups().size() + 2; }

 private:
  DeviceTimes& times_;
};

// For an arena on the current context's GPU. `device`: null where the collectives are the host's (gloo), and the
// exchange is staged. Throws UserError as Exchange. Arena, queue and device must outlive it.
std::unique_ptr<DeviceExchange> make_device_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     DeviceCommunicator* device,
                                                     const ExchangeOptions& options);

// The two kinds of it, for tests.
// "" where gradients can stay on the GPU; else the key that keeps them from it and its value, for the log. What
// only the compressors know is not looked at.
std::string what_needs_the_host(const ExchangeOptions& options);
// Gradients stay on the GPU. Null where a group's compressor has no kernels. For options that what_needs_the_host()
// does not name.
std::unique_ptr<DeviceExchange> make_gpu_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                  DeviceCommunicator& device, const ExchangeOptions& options);
std::unique_ptr<DeviceExchange> make_staged_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     const ExchangeOptions& options);

}  // namespace topknot::cuda
