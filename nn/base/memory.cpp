#include "nn/base/memory.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "nn/base/text.h"

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

// The limits of this process's cgroup and of those around it. Version 1 has a hierarchy for memory alone.
double container_limit() {
  double limit = kNone;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const bool first_version = line.find(":memory:") != std::string::npos;
    if (!first_version && line.rfind("0::", 0) != 0) continue;
    std::filesystem::path group = line.substr(line.find(":/") + 1);
    const std::string root = first_version ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
    const char* file = first_version ? "memory.limit_in_bytes" : "memory.max";
    while (true) {
      limit = std::min(limit, number_in((root / group.relative_path() / file).c_str()));
      if (!group.has_relative_path()) break;
      group = group.parent_path();
    }
  }
  return limit;
}

double ulimit_bytes() {
  return std::min(soft_limit(RLIMIT_AS), soft_limit(RLIMIT_DATA));
}

// In bytes, of /proc/self/status, such as "VmSize"; 0 if it is not there.
double own_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  double kilobytes = 0;
  for (std::string word; status >> word;)
    if (word == name + ":") return status >> kilobytes ? 1024 * kilobytes : 0;
  return 0;
}

}  // namespace

OutOfMemory::OutOfMemory(const std::string& what, double bytes)
    : UserError(fmt::format(
          "out of memory: {}{}; this process may have at most {}{}, of which other programs use a part; "
          "lower data.batch_size, data.workers, dist.ranks or the size of the data or the model",
          what, bytes > 0 ? fmt::format(" ({})", format_bytes(bytes)) : "", format_bytes(memory_limit()),
          memory_limit() == ulimit_bytes() ? " (ulimit -v or -d)" : "")) {}

double memory_limit() {
  struct sysinfo machine {};
  double limit = kNone;
  if (sysinfo(&machine) == 0)
    limit =
        (static_cast<double>(machine.totalram) + static_cast<double>(machine.totalswap)) * machine.mem_unit;
  return std::min({limit, ulimit_bytes(), container_limit()});
}

double address_room() {
  return std::min(soft_limit(RLIMIT_AS) - own_bytes("VmSize"), soft_limit(RLIMIT_DATA) - own_bytes("VmData"));
}

double stack_bytes() {
  pthread_attr_t attributes;
  std::size_t bytes = 0;
  if (pthread_getattr_default_np(&attributes) != 0) return 0;
  pthread_attr_getstacksize(&attributes, &bytes);
  pthread_attr_destroy(&attributes);
  return static_cast<double>(bytes);
}

void check_stacks() {
  constexpr double kLeast = 256 << 10;  // resnet18 overflows 16 KiB
  if (const double bytes = std::min(stack_bytes(), soft_limit(RLIMIT_STACK)); bytes > 0 && bytes < kLeast)
    throw UserError(
        fmt::format("ulimit -s: the stacks of threads have {:.0f} KiB, and {:.0f} are needed; raise it",
                    bytes / 1024, kLeast / 1024));
  for (const char* name : {"OMP_STACKSIZE", "GOMP_STACKSIZE"}) {  // in KiB, or with a unit
    const char* text = std::getenv(name);
    if (!text) continue;
    char* unit = nullptr;
    double bytes = std::strtod(text, &unit);
    if (unit == text) continue;  // OpenMP warns and takes its default
    while (std::isspace(static_cast<unsigned char>(*unit))) ++unit;
    const char letter = static_cast<char>(std::toupper(static_cast<unsigned char>(*unit)));
    bytes *= letter == 'B' ? 1 : letter == 'M' ? 0x1p20 : letter == 'G' ? 0x1p30 : 0x1p10;
    if (bytes < kLeast || bytes > memory_limit())
      throw UserError(fmt::format("{}: {} for the stack of a thread is {}; give 256K to 8M, or unset it",
                                  name, text, bytes < kLeast ? "too little" : "more than the memory"));
    return;
  }
}

double thread_limit() {
  return std::min({soft_limit(RLIMIT_NPROC), number_in("/proc/sys/kernel/threads-max"),
                   number_in("/proc/sys/kernel/pid_max"), number_in("/sys/fs/cgroup/pids.max")});
}

}  // namespace topknot
