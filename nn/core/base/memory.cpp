#include "nn/core/base/memory.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <fstream>

#include "nn/core/base/text.h"

namespace topknot {
namespace {

constexpr double kNone = 1e30;

double number_in(const char* path) {
  double value = kNone;
  return std::ifstream(path) >> value && value > 0 ? value : kNone;  // "max": none
}

double soft_limit(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return kNone;
  return static_cast<double>(limit.rlim_cur);
}

}  // namespace

OutOfMemory::OutOfMemory(const std::string& what, double bytes)
    : UserError(fmt::format(
          "out of memory: {}{}; this process may have at most {}, of which other programs use a part; "
          "lower data.batch_size, data.workers, dist.ranks or the size of the data or the model",
          what, bytes > 0 ? fmt::format(" ({})", format_bytes(bytes)) : "", format_bytes(memory_limit()))) {}

double memory_limit() {
  struct sysinfo machine {};
  double limit = kNone;
  if (sysinfo(&machine) == 0)
    limit =
        (static_cast<double>(machine.totalram) + static_cast<double>(machine.totalswap)) * machine.mem_unit;
  return std::min({limit, soft_limit(RLIMIT_AS), number_in("/sys/fs/cgroup/memory.max"),
                   number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes")});
}

double thread_limit() {
  return std::min({soft_limit(RLIMIT_NPROC), number_in("/proc/sys/kernel/threads-max"),
                   number_in("/proc/sys/kernel/pid_max"), number_in("/sys/fs/cgroup/pids.max")});
}

}  // namespace topknot
