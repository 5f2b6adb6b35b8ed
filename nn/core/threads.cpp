#include "nn/core/threads.h"

#include <omp.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <system_error>

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

void limit_spinning(char** argv) {
  // Rounds of some 10 ns: as fast as libgomp's 300,000 on idle cores, and two runs that share them have 0.4 to 0.55 of
  // one's speed each. With 1,000 small networks lose up to 12 %, with 10,000 some take ten times as long beside others.
  constexpr const char* kSpinRounds = "3000";
  if (!spin_limit().empty()) return;
  // The link's text rather than the link, whose name the process would get. A program that was started as the dynamic
  // loader's argument has no loader of its own, and the link names the loader.
  std::error_code error;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error || getauxval(AT_BASE) == 0) return;
  setenv("GOMP_SPINCOUNT", kSpinRounds, 1);
  execv(program.c_str(), argv);
  unsetenv("GOMP_SPINCOUNT");
}

}  // namespace topknot
