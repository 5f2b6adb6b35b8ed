#pragma once
// How long a wait for other ranks goes on after a stop signal. Within a step, the ranks are to agree on the stop and end
// after the same one (train/trainer.cpp), so a wait ends by itself where the others still come; it gives up where nothing
// happens any more.

#include <chrono>
#include <cstdint>

#include "nn/base/patience.h"
#include "nn/base/program.h"

namespace topknot {

class StopGracePeriod {
 public:
  // For peers that are not known to be alive; and for those that are, but may be long in their own part of a step.
  static constexpr std::chrono::milliseconds kSilent{1000};
  inline static std::chrono::milliseconds alive{60'000};  // shorter in tests

  // Polled while waiting: whether to give up. `progress`: any number that changes with every step of the wait.
  bool ended(std::uint64_t progress, bool peers_alive) {
    if (stop_signal() == 0 || progress != progress_ || !started_) {
      progress_ = progress;
      waited_ = Patience();
      started_ = stop_signal() != 0;
      return false;
    }
    return std::chrono::duration<double>(waited_.passed()) >= (peers_alive ? alive : kSilent);
  }

 private:
  bool started_ = false;  // a signal was seen
  std::uint64_t progress_ = 0;
  Patience waited_;  // since the last progress
};

}  // namespace topknot
