#pragma once
// Wall-clock time: of a scope, added to a total, and since a point in time. Seconds.

#include <chrono>

namespace topknot {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of one call of `work`.
template <class Work>
double milliseconds(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return 1e3 * seconds_since(start);
}

class Stopwatch {
 public:
  // `total`, in seconds, must outlive the stopwatch.
  explicit Stopwatch(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() { total_ += seconds_since(start_); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace topknot
