#pragma once

#include <omp.h>

#include <thread>

#include "tests/support/error_text.h"

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

// What `body(i)` throws in each of so many threads, "" where nothing.
template <class Body>
std::vector<std::string> errors_of_threads(int count, const Body& body) {
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&, i] { errors[i] = error_text([&] { body(i); }); });
  for (auto& thread : threads) thread.join();
  return errors;
}

}  // namespace topknot::testing
