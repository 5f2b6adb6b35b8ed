#include "dist/launch/cores.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>

namespace topknot {

std::vector<int> parse_core_list(const std::string& list) {
  std::vector<int> cores;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    const char *at = part.data(), *const end = at + part.size();
    int first = 0, last = 0;
    auto read = std::from_chars(at, end, first);
    if (read.ec != std::errc()) return {};
    last = first;
    if (read.ptr != end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    if (read.ec != std::errc() || read.ptr != end || first < 0 || last < first || last >= CPU_SETSIZE)
      return {};
    for (int core = first; core <= last; ++core) cores.push_back(core);
  }
  return cores;
}

int keep_to_cores_near(const std::string& pci_device, const std::filesystem::path& devices) {
  std::string name = pci_device, list;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  std::getline(std::ifstream(devices / name / "local_cpulist"), list);
  cpu_set_t allowed, near;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
  CPU_ZERO(&near);
  for (const int core : parse_core_list(list)) CPU_SET(core, &near);
  CPU_AND(&near, &near, &allowed);
  const int count = CPU_COUNT(&near);
  if (count == 0 || count == CPU_COUNT(&allowed) || sched_setaffinity(0, sizeof near, &near) != 0) return 0;
  return count;
}

double cpu_quota(const std::filesystem::path& groups, const std::filesystem::path& mount) {
  double least = std::numeric_limits<double>::infinity();
  std::ifstream lines(groups);
  for (std::string line; std::getline(lines, line);) {
    // "0::/a/b" is version 2, "4:cpu,cpuacct:/a/b" version 1.
    const auto first = line.find(':'), second = line.find(":/", first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find(",cpu,") == line.npos) continue;
    // A container may see its own group as the mount's root, whatever the path says: groups that are not there are passed over.
    for (std::filesystem::path group = line.substr(second + 2);; group = group.parent_path()) {
      const std::filesystem::path folder = mount / (unified ? "" : "cpu") / group;
      double quota = 0, period = 0;
      if (unified) {
        std::ifstream(folder / "cpu.max") >> quota >> period;  // "max 100000" if there is none
      } else {
        std::ifstream(folder / "cpu.cfs_quota_us") >> quota;  // -1 if there is none
        std::ifstream(folder / "cpu.cfs_period_us") >> period;
      }
      if (quota > 0 && period > 0) least = std::min(least, quota / period);
      if (group.empty()) break;
    }
  }
  return least;
}

int usable_cores() {
  // OpenMP knows the mask that the process began with, which OMP_PROC_BIND narrows for this thread.
  const double cores = std::min<double>(omp_get_num_procs(), cpu_quota());
  return std::max(1, static_cast<int>(cores));
}

}  // namespace topknot
