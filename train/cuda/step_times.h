#pragma once
// The times of a step on a GPU, from the marks that it left (DeviceTimes).

#include <vector>

#include "dist/exchange/cuda/device_exchange.h"
#include "nn/core/step.h"
#include "train/trace.h"

namespace topknot::cuda {

struct StepTimes {
  std::vector<StepTrace::Piece> pieces;  // data, forward, backward, clip, update
  std::vector<ExchangeSpan> spans;       // of the exchange

  // `clock`: two times per mark, as DeviceTimes::clock() had them after the step.
  StepTimes(const DeviceTimes& times, std::span<const DeviceTimes::Mark> marks, const std::uint64_t* clock);
  // Adds the times as the runner on a CPU measures them. backward_s is without encoding and waits.
  void add_to(StepSeconds& total) const;
};

// Whether each time is at least so many nanoseconds after the one before.
bool times_apart(std::span<const std::uint64_t> times, std::uint64_t nanoseconds);

}  // namespace topknot::cuda
