#pragma once
// Splits a batch over the calling rank's compute threads, the same way in every op, so that an image stays in
// the cache of the core that made it.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>

namespace topknot {

// Runs fn(thread, begin, end) on disjoint ranges that cover [0, n). Exceptions come back to the caller.
template <class Fn>
void parallel_ranges(std::int64_t n, Fn&& fn) {
  const int threads =
      static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), std::max<std::int64_t>(n, 1)));
  if (threads <= 1) return fn(0, std::int64_t{0}, n);
  std::exception_ptr error;
#pragma omp parallel num_threads(threads)
  {
    const int t = omp_get_thread_num(), count = omp_get_num_threads();
    try {
      fn(t, n * t / count, n * (t + 1) / count);
    } catch (...) {
#pragma omp critical(topknot_parallel_ranges)
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace topknot
