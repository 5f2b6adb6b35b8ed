#include "dist/launch/launch.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <thread>

#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

namespace topknot {
namespace {

TEST_CASE("lists of cores are read as Linux writes them") {
  CHECK(parse_core_list("0-3,8,10-11") == std::vector<int>{0, 1, 2, 3, 8, 10, 11});
  CHECK(parse_core_list("5") == std::vector<int>{5});
  for (const char* wrong : {"", "x", "3-1", "-1", "1-", "1;2", "0-99999999", "1 2"})
    CHECK(parse_core_list(wrong).empty());
}

TEST_CASE("a thread keeps to those of its cores that are next to a device") {
  const TempFolder temp;
  const auto kept = [&](const std::string& list) {
    std::filesystem::create_directories(temp.at("0000:3b:00.0"));
    std::ofstream(temp.at("0000:3b:00.0/local_cpulist")) << list << '\n';
    std::pair<int, int> result;  // what it says, and the thread's cores afterwards
    std::thread([&] {
      result.first = keep_to_cores_near("0000:3B:00.0", temp.at(""));
      cpu_set_t cores;
      sched_getaffinity(0, sizeof cores, &cores);
      result.second = CPU_COUNT(&cores);
    }).join();
    return result;
  };
  cpu_set_t allowed;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  const int all = CPU_COUNT(&allowed);
  int first = 0;
  while (!CPU_ISSET(first, &allowed)) ++first;
  CHECK(kept("0-1023") == std::pair(0, all));
  CHECK(kept("") == std::pair(0, all));
  CHECK(kept("nonsense") == std::pair(0, all));
  CHECK(kept(std::to_string(first)) == (all > 1 ? std::pair(1, 1) : std::pair(0, all)));
  CHECK(keep_to_cores_near("0000:99:00.0", temp.at("")) == 0);
}

TEST_CASE("the CPU quota is the least of a process' control groups and those above them, version 1 or 2") {
  const TempFolder temp;
  const auto write = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(temp.at(file)).parent_path());
    std::ofstream(temp.at(file)) << text << '\n';
  };
  const auto quota = [&](const std::string& groups) {
    write("groups", groups);
    return cpu_quota(temp.at("groups"), temp.at("mount"));
  };
  const double none = std::numeric_limits<double>::infinity();
  CHECK(cpu_quota(temp.at("missing"), temp.at("mount")) == none);
  CHECK(quota("0::/a/b") == none);
  write("mount/a/b/cpu.max", "max 100000");
  CHECK(quota("0::/a/b") == none);
  write("mount/a/b/cpu.max", "350000 100000");
  CHECK(quota("0::/a/b") == 3.5);
  write("mount/a/cpu.max", "200000 100000");
  CHECK(quota("0::/a/b") == 2);
  CHECK(quota("0::/a/b/c") == 2);
  write("mount/cpu.max", "50000 100000");
  CHECK(quota("0::/a/b") == 0.5);
  CHECK(quota("0::/") == 0.5);
  CHECK(quota("0::/../elsewhere") == 0.5);  // a container, whose own group is the root of the mount

  CHECK(quota("1:name=systemd:/a\n3:cpuset:/a\n4:cpu,cpuacct:/j") == none);
  write("mount/cpu/j/cpu.cfs_quota_us", "-1");
  write("mount/cpu/j/cpu.cfs_period_us", "100000");
  CHECK(quota("4:cpu,cpuacct:/j") == none);
  write("mount/cpu/j/cpu.cfs_quota_us", "150000");
  CHECK(quota("4:cpu,cpuacct:/j") == 1.5);
  CHECK(quota("4:cpuacct,cpu:/j/k\n0::/") == 0.5);
  write("mount/cpu/cpu.cfs_quota_us", "25000");
  write("mount/cpu/cpu.cfs_period_us", "100000");
  CHECK(quota("4:cpuacct,cpu:/j/k\n0::/") == 0.25);
  for (const char* damaged : {"", "0", "::", "0:", "x", "4:cpu"}) CHECK(quota(damaged) == none);
}

TEST_CASE("the cores that may be used are those of the affinity mask") {
  cpu_set_t allowed;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  const double quota = cpu_quota();
  CHECK(usable_cores() == std::max(1, static_cast<int>(std::min<double>(CPU_COUNT(&allowed), quota))));
  int found = 0;
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int core = 0; CPU_COUNT(&one) == 0; ++core)
      if (CPU_ISSET(core, &allowed)) CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
    found = usable_cores();
  }).join();
  CHECK(found == 1);
}

}  // namespace
}  // namespace topknot
