#include "nn/core/threads.h"

#include <omp.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "nn/base/log.h"

namespace topknot {
namespace {

// "NAME=value, ..." of those that are set.
std::string environment(std::initializer_list<const char*> names) {
  std::string text;
  for (const char* name : names)
    if (const char* value = std::getenv(name))
      text += (text.empty() ? "" : ", ") + std::string(name) + "=" + value;
  return text;
}

}  // namespace

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
  return environment({"OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS"});
}

std::string spin_limit() {
  return environment({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"});
}

// A team that waits, which libgomp counts, until the end of its scope.
class SpinControl::IdleTeam {
 public:
  // libgomp ends the program if it cannot start a thread, so std::thread tries before.
  explicit IdleTeam(int size) {
    {
      Trial trial;
      for (int i = 0; i < size; ++i) trial.threads.emplace_back([] {});
    }
    thread_ = std::thread([this, size] {
      omp_set_dynamic(0);
      [[maybe_unused]] int started = 1;
#pragma omp parallel num_threads(size)
#pragma omp master
      started = omp_get_num_threads();
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return over_; });
    });
  }
  ~IdleTeam() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  struct Trial {
    std::vector<std::thread> threads;
    ~Trial() {
      for (std::thread& thread : threads) thread.join();
    }
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

SpinControl::SpinControl() : on_(spin_limit().empty()), last_(Clock::now()) {}
SpinControl::~SpinControl() = default;

void SpinControl::poll() {
  constexpr double kInterval = 0.25;  // seconds
  const Clock::time_point now = Clock::now();
  const double passed = std::chrono::duration<double>(now - last_).count();
  if (!on_ || passed < kInterval) return;
  last_ = now;
  // "nanoseconds on a core, nanoseconds ready and without one, ..."
  double on_core = 0, delay = 0;
  if (!(std::ifstream("/proc/thread-self/schedstat") >> on_core >> delay)) return;
  const double before = std::exchange(delay_, 1e-9 * delay);
  if (before >= 0) update((delay_ - before) / passed);
}

void SpinControl::update(double share) {
  constexpr double kContended = 0.1;
  constexpr int kCalm = 8;  // two seconds
  calm_ = share < kContended ? calm_ + 1 : 0;
  if (idle_ && calm_ >= kCalm) {
    idle_.reset();
    log_debug("the cores are free: waiting threads spin");
  }
  if (!on_ || calm_ > 0 || idle_ || omp_get_max_threads() == 1) return;
  try {
    log_debug("other programs want the cores: waiting threads sleep");
    idle_ = std::make_unique<IdleTeam>(std::max(2, omp_get_num_procs() - omp_get_max_threads() + 2));
  } catch (const std::system_error&) {  // no more threads: they go on spinning
  }
}

}  // namespace topknot
