// What train --check-network compares, with a network that does harm.
#include "train/network_check.h"

#include <algorithm>

#include "tests/dist/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

// Gathers and sums over the host, and then spoils one value on rank 1.
NetworkPath spoilt(Communicator& host, bool gather, std::size_t from_bytes) {
  const bool here = host.rank() == 1;
  NetworkPath path;
  path.over = "a bad wire";
  path.gather = [&host, here, gather, from_bytes](std::span<const std::byte> mine, std::span<std::byte> all) {
    std::vector<std::vector<std::byte>> blocks;
    host.all_gather(mine, blocks);
    for (std::size_t r = 0; r < blocks.size(); ++r)
      std::copy(blocks[r].begin(), blocks[r].end(),
                all.begin() + static_cast<std::ptrdiff_t>(r * mine.size()));
    if (here && gather && all.size() >= from_bytes) all[all.size() - 1] ^= std::byte{1};
    return 0.001;
  };
  path.sum = [&host, here, gather, from_bytes](std::span<float> data) {
    host.all_reduce(data, SumOrder::ranks);
    if (here && !gather && data.size_bytes() >= from_bytes) data[7] += 1;
    return 0.001;
  };
  return path;
}

TEST_CASE("a network that changes one value is found out, in every collective and size") {
  for (const bool gather : {true, false})
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{1} << 20}) {
      const auto errors = errors_of_ranks(
          "threads", 2, [&](Communicator& host) { check_path(host, spoilt(host, gather, bytes)); });
      CHECK(says(errors[1], {"rank 1", gather ? "all_gather" : "all_reduce", "a bad wire",
                             "wrong value at place", gather ? (bytes == 1 ? "1023" : "1048575") : "7"}));
      CHECK(says(errors[0], {"wrong value"}));
    }
}

TEST_CASE("the rows of a check count what a rank sends") {
  std::vector<NetworkRow> rows;
  run_ranks("threads", 4, [&](Communicator& host) {
    auto mine = check_path(host, spoilt(host, true, std::size_t{1} << 40));
    if (host.rank() == 0) rows = std::move(mine);
  });
  REQUIRE(rows.size() == 6);
  CHECK(rows[0].bytes == 1024);
  CHECK(rows[0].gigabytes_per_second == Approx(768 / 0.001 / 1e9));  // three of four blocks
  CHECK(rows[5].bytes == 1 << 24);
  CHECK(rows[5].gigabytes_per_second == Approx(1.5 * (1 << 24) / 0.001 / 1e9));  // and twice in a sum
}

}  // namespace
}  // namespace topknot
