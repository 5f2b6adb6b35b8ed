// The GPU's side of train --check-network.
#include "train/network_check.h"

#include "dist/comm/communicator.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

TEST_CASE("ranks that share a GPU check what they send each other there") {
  std::vector<std::vector<NetworkRow>> rows(2);
  run_ranks("threads", 2, [&](Communicator& host) {
    rows[static_cast<std::size_t>(host.rank())] = check_gpu_path(host, 0, 60);
  });
  for (const auto& mine : rows) {
    REQUIRE(mine.size() == 6);
    CHECK(mine[0].over == "GPU, threads");
    CHECK(mine[5].bytes == 1 << 24);
  }
  CHECK(gpu_count() >= 1);
  CHECK(gpu_name(0).find("0: ") == 0);
}

}  // namespace
}  // namespace topknot
