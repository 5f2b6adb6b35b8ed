#pragma once
// Waiting for a GPU without blocking in a call of CUDA.

#include <algorithm>
#include <chrono>
#include <thread>

#include "dist/launch/socket.h"

namespace topknot::cuda {

// Sleeps between looks: short ones at first, at most 2 ms, about 5 % of what has passed.
class PollingWait {
 public:
  void pause() const {
    const auto passed = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start_);
    std::this_thread::sleep_for(
        std::clamp(passed / 20, std::chrono::microseconds(10), std::chrono::microseconds(2000)));
  }

 private:
  Clock::time_point start_ = Clock::now();
};

}  // namespace topknot::cuda
