#pragma once
// Adds the wall-clock time of a scope to a total.

#include <chrono>

namespace topknot {

class Stopwatch {
 public:
  // `total`, in seconds, must outlive the stopwatch.
  explicit Stopwatch(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace topknot
