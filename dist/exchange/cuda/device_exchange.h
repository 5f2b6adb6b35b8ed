#pragma once
// dist/exchange/exchange.h for gradients in GPU memory: the same groups in the same order, compressed, carried and decoded
// on the GPU, without the host waiting for it. A step, on every rank:
//
//   begin_step()                 the words of the step go to the GPU (not part of a graph)
//   ready(parameter)             in the hook: encodes the group that this completes, on the compute stream; its
//                                collective follows on the communication stream
//   finish()                     decodes, agrees that the step is finite, commits; on the compute stream
//   end_step()                   host: the memories of the slices swap roles (not part of a graph)
//
// What became of the step is in status(), in GPU memory: the optimizer reads it there, the host later.
//
// A method without kernels of its own, and every method under dist.backend gloo, goes through the CPU instead:
// the gradients are copied to the host, exchanged there (dist/exchange/exchange.h), and the averages copied back; the
// host then waits in finish().

#include <memory>
#include <span>
#include <vector>

#include "compress/cuda/device_compressor.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/cuda/device_communicator.h"
#include "dist/exchange/exchange.h"
#include "nn/core/parameter.h"

namespace topknot::cuda {

class DeviceExchange {
 public:
  virtual ~DeviceExchange() = default;
  virtual const std::vector<Group>& groups() const = 0;
  virtual std::uint64_t planned_bytes(double density) const = 0;

  virtual void begin_step(std::int64_t step, double density, std::span<const float> weights, double lr) = 0;
  virtual void ready(Parameter& parameter) = 0;
  // `loss`: this rank's, one float in GPU memory, or null; where it is not finite the step is refused.
  void finish(const float* loss) {
    complete(loss);
    collectives();
    decode();
  }
  virtual void end_step() = 0;

  // Of the last finish().
  virtual std::span<float> averaged(const Group& group) = 0;  // GPU memory
  virtual GradientForm form(const Group& group) const = 0;
  virtual StepParameters* parameters() = 0;  // GPU memory
  virtual StepStatus* status() = 0;          // GPU memory
  // Payload bytes that a rank sends and receives in a step, as ExchangeStats counts them; the GPU's blocks have
  // equal lengths, so these do not depend on the data. With the CPU's exchange, of the last step.
  virtual std::uint64_t bytes_sent() const = 0;
  virtual std::uint64_t bytes_received() const = 0;

  // What of ready() to finish() may be captured in a graph: all of it; or ready() to complete() in one graph and
  // decode() in another, with collectives() between them in every step, outside of graphs (threads, whose ranks
  // meet on the host); or nothing. For `parts`, ready() does not send.
  enum class Capture { none, parts, whole };
  virtual Capture capture() const = 0;
  // finish() by parts. Parameters that were not ready join the step here; and the loss, which all ranks hear of.
  virtual void complete(const float* loss) = 0;
  virtual void collectives() = 0;
  virtual void decode() = 0;
  // A number that changes whenever what a graph has captured is out of date (a density, a slice's memory).
  virtual std::uint64_t capture_key() const = 0;

  // As Exchange's, byte for byte; both wait for the GPU. Where the exchange is the CPU's, residuals lie in host
  // memory: state() writes them to the arena's residuals as well, load_state() takes them from there.
  virtual std::vector<std::byte> state() const = 0;
  virtual void load_state(std::span<const std::byte> bytes) = 0;
};

// For an arena on the current context's GPU. `device`: null where the collectives are the host's (gloo), and the
// exchange the CPU's. Throws UserError as Exchange. Arena, queue and device must outlive it.
std::unique_ptr<DeviceExchange> make_device_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     DeviceCommunicator* device,
                                                     const ExchangeOptions& options);

}  // namespace topknot::cuda
