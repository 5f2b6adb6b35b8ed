#pragma once
// The exchange (dist/exchange/exchange.h) of gradients in GPU memory: the same groups in the same order,
// without the host waiting for the GPU. Encoding, decoding and committing run on the compute stream,
// collectives on the communication stream. The outcome of a step is in step_state().status, in GPU memory:
// the optimizer reads it there, the host later. Averages, residuals and states are the host's, bit for bit.
//
// A method without kernels, and every method under dist.backend gloo, is staged: gradients are copied to the
// host, exchanged there as the host's are, and the averages copied back; the host then waits.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compress/cuda/device_step.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/cuda/device_communicator.h"
#include "dist/exchange/exchange.h"
#include "dist/exchange/transport.h"
#include "nn/core/cuda/context.h"
#include "nn/core/parameter.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// Measures the pieces of a step on a GPU. The GPU writes its own clock at the begin and the end of each
// piece, so graphs hold the marks and no step waits for the host; the host reads them with the step's
// outcome. Every write is a small kernel, so not every step is marked.
class DeviceTimes {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // `piece`: not null for a part of the step that the exchange does not know, "forward" and so on; else
  // `span` is one of the exchange, without its times.
  struct Mark {
    const char* piece = nullptr;
    ExchangeSpan span = {};
  };

  // Until then no step is marked. On the current context's GPU; waits for it. `most`: marks of a step.
  void turn_on(std::size_t most);

  // `marked`: whether the pieces of this step are; otherwise nothing is written.
  void begin_step(bool marked) { marks_.clear(), marked_ = marked; }
  bool marked() const { return marked_; }
  // Runs `work`, which puts its own on the stream, between two writes of the clock.
  void around(const Mark& mark, cudaStream_t stream, const auto& work) {
    const std::size_t place = begin(mark, stream);
    work();
    end(place, stream);
  }
  // A graph writes to the places that its marks had when it was recorded: those from `first` on.
  std::vector<Mark> since(std::size_t first) const {
    return {marks_.begin() + static_cast<std::ptrdiff_t>(first), marks_.end()};
  }
  // Those of a graph that is started now.
  void append(const std::vector<Mark>& marks) { marks_.insert(marks_.end(), marks.begin(), marks.end()); }
  const std::vector<Mark>& marks() const { return marks_; }

  // GPU memory: two times per mark, in nanoseconds; those of the last step.
  std::span<const std::uint64_t> clock() const { return {clock_.data(), clock_.size()}; }
  // Converts the GPU's clock to the host's.
  Time host_time(std::uint64_t nanoseconds) const {
    return host_zero_ + std::chrono::nanoseconds(static_cast<std::int64_t>(nanoseconds - zero_));
  }

 private:
  std::size_t begin(const Mark& mark, cudaStream_t stream) {
    if (!marked_) return 0;
    const std::size_t place = 2 * marks_.size();
    TOPKNOT_CHECK(place + 1 < clock_.size(), "more marks than a step was said to have");
    marks_.push_back(mark);
    write_time(stream, clock_.data() + place);
    return place;
  }
  void end(std::size_t place, cudaStream_t stream) {
    if (marked_) write_time(stream, clock_.data() + place + 1);
  }

  DeviceArray<std::uint64_t> clock_;
  bool marked_ = false;
  std::vector<Mark> marks_;  // of the step
  Time host_zero_;
  std::uint64_t zero_ = 0;  // of the GPU's clock, at host_zero_
};

class DeviceExchange final : public Exchange {
 public:
  // `times`: the transport's.
  DeviceExchange(ParameterArena& arena, std::vector<Group> groups, std::unique_ptr<Transport> transport,
                 DeviceTimes& times, const ExchangeOptions& options,
                 std::vector<std::unique_ptr<Compressor>> compressors = {})
      : Exchange(arena, std::move(groups), std::move(transport), options, std::move(compressors)),
        times_(times) {}
  // Marks the pieces of the steps if it is on: at most nine for each group, and four more.
  DeviceTimes& times() { return times_; }
  std::size_t most_marks() const { return 9 * groups().size() + 4; }

 private:
  DeviceTimes& times_;
};

// For an arena on the current context's GPU. `device`: null if the collectives are the host's (gloo), and the
// exchange is staged. Throws UserError as Exchange. Arena, queue and device must outlive it.
std::unique_ptr<DeviceExchange> make_device_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     DeviceCommunicator* device,
                                                     const ExchangeOptions& options);

// The two kinds of it, for tests.
// "" if gradients can stay on the GPU; else the key that keeps them from it and its value, for the log. What
// only the compressors know is not looked at.
std::string what_needs_the_host(const ExchangeOptions& options);
// Gradients stay on the GPU. Null if a compressor lacks kernels. For options that pass what_needs_the_host().
std::unique_ptr<DeviceExchange> make_gpu_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                  DeviceCommunicator& device, const ExchangeOptions& options);
std::unique_ptr<DeviceExchange> make_staged_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     const ExchangeOptions& options);

}  // namespace topknot::cuda
