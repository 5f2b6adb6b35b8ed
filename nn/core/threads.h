#pragma once
// The threads of parallel loops: how many the calling thread has, and how they wait for each other.
//
// A rank's compute thread alone has a team of several. With more threads than cores libgomp hardly spins at all, in any
// team, and steps of small networks take up to twice as long; so loops on other threads (the collective queue's) run
// on one.

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

// Limits how long a waiting thread spins before it sleeps. By default libgomp's threads spin for milliseconds, and if
// another program has their cores, every loop waits as long for a thread that could run on the spinning one's core:
// two runs on one machine then take up to thirty times as long as one. libgomp reads GOMP_SPINCOUNT when it is loaded.
// Therefore this sets it and starts the program anew; where that fails, it returns with libgomp's default. It returns
// at once if GOMP_SPINCOUNT or OMP_WAIT_POLICY is set. To be called first in main().
void limit_spinning(char** argv);

// The variable that decides how long threads spin, such as "GOMP_SPINCOUNT=3000"; "" if none is set.
std::string spin_limit();

}  // namespace topknot
