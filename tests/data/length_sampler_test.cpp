#include "data/length_sampler.h"

#include <algorithm>
#include <set>

#include "tests/support/catch.h"
#include "tests/support/user_error.h"

using namespace topknot;

TEST_CASE(
    "a length sampler's steps are neighbours in length, each sample at most once per epoch, over all ranks") {
  constexpr int kRanks = 3;
  const LengthSampler sampler(100, kRanks, 4, 7);
  REQUIRE(sampler.steps_per_epoch() == 8);
  std::set<std::int64_t> left_out;
  for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
    std::set<std::int64_t> seen;
    for (const std::int64_t first : sampler.epoch(epoch)) {
      std::set<std::int64_t> step;
      for (int rank = 0; rank < kRanks; ++rank)
        for (const std::int64_t sample : sampler.batch(first, rank)) {
          CHECK((sample >= 0 && sample < 100));
          CHECK(seen.insert(sample).second);
          step.insert(sample);
        }
      CHECK(*step.rbegin() - *step.begin() == 11);
    }
    CHECK(seen.size() == 96);
    for (std::int64_t i = 0; i < 100; ++i)
      if (!seen.count(i)) left_out.insert(i);
  }
  CHECK((left_out.count(0) == 1 && left_out.count(99) == 1));  // both ends take turns
}

TEST_CASE(
    "a length sampler begins with the shortest, then takes an order of its own each epoch, the same for a "
    "seed") {
  const LengthSampler sampler(100, 2, 5, 7), same(100, 2, 5, 7), other(100, 2, 5, 8);
  const auto first = sampler.epoch(0);
  CHECK(std::is_sorted(first.begin(), first.end()));
  CHECK(sampler.epoch(1) == same.epoch(1));
  CHECK(sampler.epoch(1) != other.epoch(1));
  CHECK(sampler.epoch(1) != sampler.epoch(2));
  CHECK(sampler.epoch(1) != first);
  CHECK(
      user_error([] { LengthSampler(9, 2, 5, 1); }, {"data.batch_size", "9 samples", "2 ranks with 5 each"}));
}
