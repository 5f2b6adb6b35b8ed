#pragma once
// Where the time of a step goes on a GPU: the GPU itself writes its clock at the begin and the end of each piece, so that
// graphs hold the marks and no step waits for the host. The host reads them with the step's outcome.

#include <cstdint>
#include <span>
#include <vector>

#include "dist/exchange/exchange.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {

class DeviceTimes {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // `piece`: not null for a part of the step that the exchange does not know, "forward" and so on; else `span` is one of
  // the exchange, without its times.
  struct Mark {
    const char* piece = nullptr;
    ExchangeSpan span = {};
  };

  // Until then marks are ignored, and nothing is written. On the current context's GPU; waits for it. `most`: marks of a step.
  void turn_on(std::size_t most);
  bool on() const { return clock_.size() > 0; }

  // A step begins: it has no marks.
  void clear() { marks_.clear(); }
  // Runs `work`, which puts its own on the stream, between two writes of the clock.
  template <class Work>
  void around(const Mark& mark, cudaStream_t stream, const Work& work) {
    const std::size_t place = begin(mark, stream);
    work();
    end(place, stream);
  }
  // A graph writes to the places that its marks had when it was recorded: those from `first` on.
  std::vector<Mark> since(std::size_t first) const;
  void append(const std::vector<Mark>& marks);  // of a graph that is started now
  const std::vector<Mark>& marks() const { return marks_; }

  // GPU memory: two times per mark, in nanoseconds; those of the last step.
  std::span<const std::uint64_t> clock() const { return {clock_.data(), clock_.size()}; }
  // By the host's clock.
  Time host_time(std::uint64_t nanoseconds) const;

 private:
  std::size_t begin(const Mark& mark, cudaStream_t stream);
  void end(std::size_t place, cudaStream_t stream);

  DeviceArray<std::uint64_t> clock_;
  std::vector<Mark> marks_;
  Time host_zero_;
  std::uint64_t zero_ = 0;  // of the GPU's clock, at host_zero_
};

}  // namespace topknot::cuda
