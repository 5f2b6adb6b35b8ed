#pragma once
// The exchange (dist/exchange/exchange.h) of gradients in GPU memory: the same groups in the same order, without the
// host waiting for the GPU. Encoding, decoding and committing run on the compute stream, collectives on the
// communication stream. The outcome of a step is in step_state().status, in GPU memory: the optimizer reads it
// there, the host
// later. Averages, residuals and states are those of gradients in host memory, bit for bit.
//
// A method without kernels, and every method under dist.backend gloo, is staged: gradients are copied to the host,
// exchanged there by the host's pipelines, and the averages copied back; the host then waits in communicate() and
// decode_and_commit().

#include <memory>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/comm/cuda/device_communicator.h"
#include "dist/exchange/cuda/device_step.h"
#include "dist/exchange/cuda/device_times.h"
#include "dist/exchange/exchange.h"
#include "dist/exchange/group_pipeline.h"
#include "nn/core/parameter.h"

namespace topknot::cuda {

// What the executions of GPU gradients share: the step's parameters and status in GPU memory.
class DeviceExecution : public StepExecution {
 public:
  // `weights`: numbers in begin_step()'s.
  explicit DeviceExecution(int weights) : step_(weights) {}
  void begin_step(const StepContext& info) override;
  StepState step_state() override { return {step_.parameters(), step_.status()}; }
  DeviceStep& step() { return step_; }
  DeviceTimes& times() { return times_; }

 protected:
  static cudaStream_t compute() { return Context::current().stream(); }
  static cudaStream_t communication() { return Context::current().communication(); }

 private:
  DeviceStep step_;
  DeviceTimes times_;
};

class DeviceExchange final : public Exchange {
 public:
  DeviceExchange(ParameterArena& arena, std::vector<Group> groups, std::unique_ptr<DeviceExecution> execution)
      : Exchange(arena, std::move(groups), std::move(execution)) {}
  // Where the pieces of its steps are marked, once it is on: at most seven for each group, and two more.
  DeviceTimes& times() { return device_execution().times(); }
  std::size_t most_marks() const { return 7 * groups().size() + 2; }

 private:
  DeviceExecution& device_execution() { return static_cast<DeviceExecution&>(execution()); }
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
