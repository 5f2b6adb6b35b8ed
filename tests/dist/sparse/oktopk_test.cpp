// What Ok-Topk carries from step to step: regions and threshold.

#include <algorithm>
#include <cmath>

#include "tests/dist/sparse/sparse_collective_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Saved {
  std::int64_t steps;
  double threshold;
  std::uint64_t k;
  std::vector<std::uint32_t> cuts;
};

Saved saved(const Fleet& fleet, std::size_t rank) {
  const auto bytes = fleet.state(rank);
  StateReader reader(bytes);
  Saved result;
  result.steps = reader.get<std::int64_t>();
  result.threshold = reader.get<double>();
  result.k = reader.get<std::uint64_t>();
  result.cuts = reader.get_list<std::uint32_t>();
  reader.finish();
  return result;
}

// The `count` largest of a normal vector whose spread falls from the first position to the last.
SparseVector largest_of_normal(std::uint32_t seed, std::size_t numel, std::size_t count) {
  const CounterRng rng(seed, RngUse::test, 1);
  std::vector<float> values(numel);
  std::vector<std::uint32_t> order(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    values[i] =
        static_cast<float>(rng.normal(i)) * (2.0f - static_cast<float>(i) / static_cast<float>(numel));
    order[i] = static_cast<std::uint32_t>(i);
  }
  std::sort(order.begin(), order.end(),
            [&](auto a, auto b) { return std::fabs(values[a]) > std::fabs(values[b]); });
  SparseVector entries;
  entries.indices.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count));
  std::sort(entries.indices.begin(), entries.indices.end());
  for (const auto index : entries.indices) entries.values.push_back(values[index]);
  return entries;
}

std::vector<SparseVector> step_entries(std::uint32_t step, int ranks, std::size_t numel, std::size_t count) {
  std::vector<SparseVector> entries;
  for (int rank = 0; rank < ranks; ++rank)
    entries.push_back(largest_of_normal(step * 32 + static_cast<std::uint32_t>(rank), numel, count));
  return entries;
}

}  // namespace

TEST_CASE("oktopk's regions hold about as many selected positions each", "[sparse_collective]") {
  constexpr int kRanks = 5;
  constexpr std::size_t kNumel = 4000, kCount = 200;
  Fleet fleet("oktopk", kRanks, kNumel);
  const auto entries = step_entries(0, kRanks, kNumel, kCount);
  fleet.sum(entries, kCount);
  fleet.commit();
  const std::vector<std::uint32_t> cuts = saved(fleet, 0).cuts;
  REQUIRE(cuts.size() == kRanks - 1);
  for (int rank = 0; rank < kRanks; ++rank) CHECK(saved(fleet, rank).cuts == cuts);
  // The cuts are the averages of the ranks' own.
  for (std::size_t cut = 0; cut < cuts.size(); ++cut) {
    std::uint64_t sum = 0;
    for (const auto& mine : entries) sum += mine.indices[(cut + 1) * kCount / kRanks];
    CHECK(cuts[cut] == sum / kRanks);
  }
  for (std::size_t region = 0; region < kRanks; ++region) {
    const std::uint32_t begin = region == 0 ? 0 : cuts[region - 1];
    const std::uint32_t end = region == cuts.size() ? kNumel : cuts[region];
    std::size_t inside = 0;
    for (const auto& mine : entries)
      for (const auto index : mine.indices) inside += index >= begin && index < end;
    CHECK(std::fabs(static_cast<double>(inside) - kCount) < 0.15 * kCount);
  }
}

TEST_CASE("oktopk's regions move every 64 steps only, and ranks without entries have no weight",
          "[sparse_collective]") {
  Fleet fleet("oktopk", 2, 100);
  const SparseVector low{true, {0, 1, 2, 3}, {1, 1, 1, 1}}, high{true, {60, 70, 80, 90}, {1, 1, 1, 1}}, none;
  fleet.sum({low, none}, 4);
  fleet.commit();
  CHECK(saved(fleet, 1).cuts == std::vector<std::uint32_t>{2});
  for (int step = 1; step < 64; ++step) {
    fleet.sum({high, high}, 4);
    fleet.commit();
    CHECK(saved(fleet, 1).cuts == std::vector<std::uint32_t>{2});
  }
  fleet.sum({high, high}, 4);
  fleet.commit();
  CHECK(saved(fleet, 1).cuts == std::vector<std::uint32_t>{80});
  CHECK(saved(fleet, 0).steps == 65);

  Fleet empty("oktopk", 4, 100);
  empty.sum(std::vector<SparseVector>(4), 4);
  empty.commit();
  CHECK(saved(empty, 3).cuts == std::vector<std::uint32_t>{25, 50, 75});
}

TEST_CASE("oktopk's threshold is exact every 32 steps, and follows the count by 1.008 between them",
          "[sparse_collective]") {
  Fleet fleet("oktopk", 1, 12);
  SparseVector few{true, {0, 1}, {9, 8}}, many;
  for (std::uint32_t i = 0; i < 12; ++i) many.indices.push_back(i), many.values.push_back(20.0f + i);
  double expected = 0;
  for (int step = 0; step < 40; ++step) {
    const bool crowded = step == 0 || step % 2 == 1;  // step 32 is not: two entries
    const std::size_t total = fleet.sum({crowded ? many : few}, 6)[0].sum.indices.size();
    fleet.commit();
    if (step == 0) expected = 26;  // the 6th of 31, 30, ...
    if (step == 32) expected = 0;  // fewer than k
    if (step == 33) expected = 26;
    std::size_t passed = 0;
    for (const float value : (crowded ? many : few).values) passed += value >= expected;
    CHECK(total == passed);
    if (total > 8) expected *= 1.008;
    if (total < 4) expected /= 1.008;
    CHECK(saved(fleet, 0).threshold == expected);
  }
  // Another k, as in a warm-up of the density: exact again.
  fleet.sum({many}, 2);
  fleet.commit();
  CHECK(saved(fleet, 0).threshold == 30);
}

TEST_CASE("two thirds or four thirds of k entries leave oktopk's threshold as it is", "[sparse_collective]") {
  Fleet fleet("oktopk", 1, 12);
  for (const std::uint32_t count : {6u, 4u, 8u, 4u}) {  // of k = 6; the first makes the threshold
    SparseVector entries;
    for (std::uint32_t i = 0; i < count; ++i)
      entries.indices.push_back(i), entries.values.push_back(20.0f + i);
    CHECK(fleet.sum({entries}, 6)[0].sum.indices.size() == count);
    fleet.commit();
    CHECK(saved(fleet, 0).threshold == 20);
  }
}

TEST_CASE("over 200 steps of random entries oktopk keeps between a third of k and three times k",
          "[sparse_collective]") {
  constexpr std::size_t kNumel = 1500, kCount = 60;
  Fleet fleet("oktopk", 4, kNumel);
  for (std::uint32_t step = 0; step < 200; ++step) {
    const auto sums = fleet.sum(step_entries(step, 4, kNumel, kCount), kCount);
    fleet.commit();
    CHECK(3 * sums[0].sum.indices.size() >= kCount);
    CHECK(sums[0].sum.indices.size() <= 3 * kCount);
  }
}

TEST_CASE(
    "a discarded step of oktopk leaves its state, and a saved state goes on as the one it was saved from",
    "[sparse_collective]") {
  constexpr int kRanks = 3;
  Fleet fleet("oktopk", kRanks, 600), loaded("oktopk", kRanks, 600);
  for (std::uint32_t step = 0; step < 70; ++step) {
    const auto before = fleet.state(0);
    fleet.sum(step_entries(1000 + step, kRanks, 600, 45), 30);
    fleet.discard();
    CHECK(fleet.state(0) == before);
    if (step % 10 == 7)
      for (std::size_t rank = 0; rank < kRanks; ++rank) loaded.load(rank, fleet.state(rank));
    const auto entries = step_entries(step, kRanks, 600, 30);
    const auto sums = fleet.sum(entries, 30);
    fleet.commit();
    CHECK(fleet.state(0) != before);
    if (step < 7) continue;
    const auto again = loaded.sum(entries, 30);
    loaded.commit();
    CHECK(again[2].sum.indices == sums[2].sum.indices);
    CHECK(again[2].sum.values == sums[2].sum.values);
    CHECK(loaded.state(1) == fleet.state(1));
  }
}

TEST_CASE("oktopk validates a saved state", "[sparse_collective]") {
  Fleet fleet("oktopk", 2, 50);
  const auto bytes_of = [](double threshold, std::vector<std::uint32_t> cuts) {
    StateWriter writer;
    writer.put<std::int64_t>(3);
    writer.put(threshold);
    writer.put<std::uint64_t>(5);
    writer.put_list(cuts);
    return writer.take();
  };
  CHECK_NOTHROW(fleet.load(0, bytes_of(0.5, {50})));
  CHECK_THROWS_AS(fleet.load(0, bytes_of(0.5, {51})), Error);
  CHECK_THROWS_AS(fleet.load(0, bytes_of(0.5, {20, 10})), Error);
  CHECK_THROWS_AS(fleet.load(0, bytes_of(-1, {20})), Error);
  CHECK_THROWS_AS(fleet.load(0, bytes_of(std::nan(""), {20})), Error);
  auto cut = bytes_of(0.5, {20});
  cut.pop_back();
  CHECK_THROWS_AS(fleet.load(0, cut), Error);
}
