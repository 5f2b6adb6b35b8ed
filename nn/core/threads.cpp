#include "nn/core/threads.h"

#include <omp.h>

#include <cstdlib>

namespace topknot {

int team_size() {
  // In a region oneDNN takes one thread, even if a nested one would have more.
  if (omp_in_parallel() || omp_get_max_active_levels() < 1) {
    if (omp_get_max_threads() != 1) omp_set_num_threads(1);
    return 1;
  }
  thread_local int settled = 0;  // a region has shown this number
  if (omp_get_max_threads() == settled && !omp_get_dynamic()) return settled;
  omp_set_dynamic(0);  // a team of changing size
  int size = 1;
#pragma omp parallel
#pragma omp master
  size = omp_get_num_threads();
  omp_set_num_threads(size);
  return settled = size;
}

int set_team_size(int threads) {
  omp_set_num_threads(threads);
  return team_size();
}

std::string team_limits() {
  std::string limits;
  for (const char* name : {"OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS"})
    if (const char* value = std::getenv(name))
      limits += (limits.empty() ? "" : ", ") + std::string(name) + "=" + value;
  return limits;
}

}  // namespace topknot
