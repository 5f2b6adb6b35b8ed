#pragma once

#include <omp.h>

namespace topknot::testing {

// OpenMP's number of threads while it lives.
class Threads {
 public:
  explicit Threads(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~Threads() { omp_set_num_threads(before_); }
  Threads(const Threads&) = delete;

 private:
  int before_;
};

}  // namespace topknot::testing
