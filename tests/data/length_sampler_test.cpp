#include "data/length_sampler.h"

#include <algorithm>
#include <set>

#include "tests/support/catch.h"
#include "tests/support/error_text.h"

using namespace topknot;

TEST_CASE(
    "a length sampler's steps are neighbours in length, each sample at most once per epoch, over all ranks") {
  constexpr int kRanks = 3;
  const LengthSampler sampler(100, kRanks, 4, 7);
  REQUIRE(sampler.steps_per_epoch() == 8);
  constexpr int kEpochs = 2000;
  std::vector<int> left_out(100, kEpochs);  // how often
  for (std::int64_t number = 0; number < kEpochs; ++number) {
    const auto epoch = sampler.epoch(number);
    std::set<std::int64_t> seen;
    for (std::int64_t step = 0; step < 8; ++step) {
      std::set<std::int64_t> of_step;
      for (int rank = 0; rank < kRanks; ++rank)
        for (const std::int64_t sample : sampler.batch(epoch, step, rank)) {
          REQUIRE((sample >= 0 && sample < 100));
          of_step.insert(sample);
          --left_out[static_cast<std::size_t>(sample)];
        }
      REQUIRE(of_step.size() == 12);
      REQUIRE(*of_step.rbegin() - *of_step.begin() <= 11 + 4);  // neighbours but for what is left out
      seen.insert(of_step.begin(), of_step.end());
    }
    REQUIRE(seen.size() == 96);
  }
  // Each alike, the shortest and the longest too: 80 times, of which the standard deviation is 8.8.
  for (const int times : left_out) CHECK((times > 40 && times < 120));
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
