#pragma once
// The threads of parallel loops: how many the calling thread has, and how they wait for each other.
//
// A rank's compute thread alone has a team of several. With more threads than cores libgomp hardly spins,
// which may double a small network's steps; so loops on other threads (the collective queue's) run on one.

#include <memory>
#include <string>

#include "nn/base/clock.h"

namespace topknot {

// The number of threads of a parallel region that begins here: omp_get_max_threads(), or fewer if the
// environment (OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS) or a region around this call allows no more. From
// then on omp_get_max_threads() is this number and OMP_DYNAMIC is off. oneDNN cuts its work by
// omp_get_max_threads() and leaves parts of it undone in a smaller team, so kernels ask for the number here
// before they make or run its primitives.
int team_size();

// Asks for `threads` in the calling thread; returns team_size(), which may be smaller.
int set_team_size(int threads);

// The environment's variables that may make a team smaller, as "OMP_THREAD_LIMIT=1"; "": none is set.
std::string team_limits();

// Lets waiting threads sleep while other programs want the cores. By default libgomp's threads spin for milliseconds, and
// a thread that spins holds the core of the one that it waits for: two runs on one machine then take up to fifty times as
// long as one. While libgomp counts more threads than cores, it hardly spins; an idle team next to the
// thread's own makes it count so, for as long as the thread waits for cores. Does nothing if OMP_WAIT_POLICY
// or GOMP_SPINCOUNT is set.
class SpinControl {
 public:
  SpinControl();
  ~SpinControl();
  // To be called by one compute thread, about once a step; measures four times a second.
  void poll();
  // Decides by the share of the last time that the thread waited for a core.
  void update(double share);
  bool sleeping() const { return idle_ != nullptr; }

 private:
  class IdleTeam;
  const bool on_;
  Clock::time_point last_;
  double delay_ = -1;  // seconds that the thread had waited for a core; below 0: not known yet
  int calm_ = 0;       // shares in a row without contention
  std::unique_ptr<IdleTeam> idle_;
};

// The variable that decides how long threads spin, such as "OMP_WAIT_POLICY=passive"; "" if none is set.
std::string spin_limit();

}  // namespace topknot
