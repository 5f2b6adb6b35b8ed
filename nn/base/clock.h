#pragma once
// Time by the steady clock: deadlines, how long work took, and limits on waiting, while this process ran.

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace topknot {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// For this process' own work; timeout_s <= 0: no limit (in practice four months). Waits for others: Patience.
inline Deadline deadline_in(double timeout_s) {
  constexpr double longest = 1e7;
  const double seconds = timeout_s <= 0 ? longest : std::min(timeout_s, longest);
  return Clock::now() +
         std::chrono::milliseconds(std::max<std::int64_t>(1, static_cast<std::int64_t>(seconds * 1000)));
}

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Stopwatch {
 public:
  // `total`, in seconds, must outlive the stopwatch.
  explicit Stopwatch(double& total) : total_(total), start_(Clock::now()) {}
  ~Stopwatch() { total_ += seconds_since(start_); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  Clock::time_point start_;
};

// The time that a wait has taken, for loops that look several times per second and wait for nothing else.
//
// A process that was suspended (SIGSTOP, a frozen container, a laptop's lid) finds a gap between two looks,
// of which at most kGap counts: in a job suspended as a whole the other ranks lost as much.
class Patience {
 public:
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
