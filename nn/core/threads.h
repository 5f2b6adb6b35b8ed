#pragma once
// How many threads the parallel loops of the calling thread have.

#include <string>

namespace topknot {

// The number of threads of a parallel region that begins here: omp_get_max_threads(), or fewer if the
// environment (OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS) or a region around this call allows no more. From
// then on omp_get_max_threads() is this number and OMP_DYNAMIC is off. oneDNN cuts its work by
// omp_get_max_threads() and leaves parts of it undone in a smaller team, so kernels ask for the number here
// before they make or run its primitives.
int team_size();

// Asks for `threads` in the calling thread; returns team_size(), which may be smaller.
int set_team_size(int threads);

// The variables of the environment that may make a team smaller, such as "OMP_THREAD_LIMIT=1"; "" if none is
// set.
std::string team_limits();

}  // namespace topknot
