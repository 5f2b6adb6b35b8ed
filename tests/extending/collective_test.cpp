// The example collective of docs/extending.md: exact sums, the same bits on every rank, and a run that uses
// it.
#include "tests/dist/sparse/sparse_collective_fixture.h"
#include "tests/train/small_run.h"

using namespace topknot;
using topknot::testing::train;

TEST_CASE("the example collective adds every entry exactly, with the same bits on every rank") {
  constexpr std::size_t numel = 60;
  for (const char* backend : {"threads", "gloo"})
    for (int ranks = 1; ranks <= 5; ++ranks) {
      INFO(backend << ", " << ranks << " ranks");
      testing::Fleet fleet("chain", ranks, numel, "auto");
      fleet.backend = backend;
      std::vector<SparseVector> entries;
      std::map<std::uint32_t, float> whole;
      for (int r = 0; r < ranks; ++r) {
        entries.push_back(testing::whole_numbers(std::uint32_t(r), numel, r == 1 ? 0.0 : 0.3, 1000));
        for (std::size_t i = 0; i < entries.back().indices.size(); ++i)
          whole[entries.back().indices[i]] += entries.back().values[i];
      }
      std::vector<std::uint32_t> positions;
      std::vector<float> values;
      for (const auto& [position, value] : whole) positions.push_back(position), values.push_back(value);
      for (const SparseSum& result : fleet.sum(entries, 5)) {
        CHECK(result.sum.finite);
        CHECK(result.sum.indices == positions);
        CHECK(result.sum.values == values);
        CHECK(result.rejected.empty());
        CHECK((result.bytes_sent > 0) == (ranks > 1));
      }
      entries[0] = {false, {}, {}};
      for (const SparseSum& result : fleet.sum(entries, 5)) {
        CHECK_FALSE(result.sum.finite);
        CHECK(result.sum.indices.empty());
      }
    }
}

TEST_CASE(
    "a run takes the example collective by its name: ranks agree, threads equal gloo, auto may choose it") {
  const std::vector<std::string> keys{"compress.name=topk", "exchange.collective=chain", "train.max_steps=8"};
  CHECK(train("threads", 3, keys).checksums == train("gloo", 3, keys).checksums);
  CHECK(load_config("", {"exchange.collective=chain"}).problems.empty());
  // Where only starting a message costs time, and every further one at the same time, two short hops win.
  CHECK(cheapest_collective({1e-6, 0, 1}, 3, 10, 8) == "chain");
  CHECK(cheapest_collective({60e-6, 1e-8, 1e-6}, 16, 1000, 8) != "chain");
}
