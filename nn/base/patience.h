#pragma once
// Limits on waiting that count the time in which this process ran.

#include <algorithm>
#include <chrono>

namespace topknot {

// The time that a wait has taken, for loops that look at it several times per second and do nothing else that waits.
//
// A process that was suspended (SIGSTOP, a frozen container, a laptop's lid) finds a gap between two looks, of which at
// most kGap counts: the other ranks of a job that was suspended as a whole have lost the same time.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kGap{500};

  // From now on. seconds <= 0: no limit.
  explicit Patience(double seconds = 0) : limit_(seconds) {}

  double passed() {  // seconds
    const Clock::time_point now = Clock::now();
    passed_ += std::min<Clock::duration>(now - last_, kGap);
    last_ = now;
    return std::chrono::duration<double>(passed_).count();
  }
  bool limited() const { return limit_ > 0; }
  double left() { return limit_ - passed(); }  // seconds, where there is a limit
  bool over() { return limited() && left() <= 0; }

 private:
  double limit_;
  Clock::duration passed_{0};
  Clock::time_point last_ = Clock::now();
};

}  // namespace topknot
