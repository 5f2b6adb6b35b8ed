#include "dist/launch/cores.h"

#include <sched.h>

#include <fstream>
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

}  // namespace
}  // namespace topknot
