#include "dist/launch/cores.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
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

}  // namespace topknot
