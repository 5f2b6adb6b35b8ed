// The order of training and evaluation samples.
#include "data/sampler.h"

#include "nn/core/rng.h"
#include "tests/support/test.h"

using namespace topknot;

namespace {

std::vector<std::int32_t> ten_labels(std::int64_t n) {
  std::vector<std::int32_t> labels;
  for (std::int64_t i = 0; i < n; ++i) labels.push_back(static_cast<std::int32_t>((i * 7) % 10));
  return labels;
}

// All ranks' shards of an epoch in one list.
std::vector<std::int64_t> dealt(const TrainSampler& sampler, int ranks, std::int64_t epoch) {
  std::vector<std::int64_t> all;
  for (int r = 0; r < ranks; ++r) {
    const auto shard = sampler.shard(epoch, r);
    REQUIRE(static_cast<std::int64_t>(shard.size()) == sampler.shard_size(r));
    all.insert(all.end(), shard.begin(), shard.end());
  }
  return all;
}

std::vector<std::int64_t> iota(std::int64_t n) {
  std::vector<std::int64_t> result(n);
  std::iota(result.begin(), result.end(), std::int64_t{0});
  return result;
}

std::vector<std::int64_t> sorted(std::vector<std::int64_t> v) {
  std::sort(v.begin(), v.end());
  return v;
}

}  // namespace

TEST_CASE("the epoch permutation holds each sample once, follows seed and epoch and favours no position") {
  const auto order = epoch_permutation(1000, 1, 0);
  CHECK(sorted(order) == iota(1000));
  CHECK(order != iota(1000));
  CHECK(order == epoch_permutation(1000, 1, 0));
  CHECK(order != epoch_permutation(1000, 1, 1));
  CHECK(order != epoch_permutation(1000, 2, 0));
  CHECK(epoch_permutation(1, 1, 0) == iota(1));
  // Where sample 0 lands, over many epochs: each eighth of the list about equally often.
  std::vector<int> count(8);
  for (int epoch = 0; epoch < 4000; ++epoch) {
    const auto of_epoch = epoch_permutation(64, 3, epoch);
    const auto position = std::find(of_epoch.begin(), of_epoch.end(), 0) - of_epoch.begin();
    ++count[position / 8];
  }
  for (const int c : count) CHECK(std::abs(c - 500) < 120);  // more than 5 standard deviations of 21
}

TEST_CASE("even shards are equal, disjoint, and drop other samples each epoch") {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const TrainSampler sampler(103, {}, {}, ranks, 5, 9);
    std::set<std::int64_t> seen;
    for (int epoch = 0; epoch < 2; ++epoch) {
      const auto all = dealt(sampler, ranks, epoch);
      CHECK(static_cast<std::int64_t>(all.size()) == 103 / ranks * ranks);
      CHECK(std::set<std::int64_t>(all.begin(), all.end()).size() == all.size());
    }
    for (int epoch = 0; epoch < 20; ++epoch)
      for (const auto i : dealt(sampler, ranks, epoch)) seen.insert(i);
    CHECK(seen.size() == 103);
    CHECK(sampler.weights() == std::vector<float>(ranks, 1.0f));
    CHECK(sampler.steps(0) == 103 / ranks / 5);
  }
}

TEST_CASE("uneven shards cover every sample, largest to smallest by the ratio") {
  const TrainSampler sampler(10000, {}, parse_shard_rule("uneven:8"), 4, 10, 1);
  CHECK(sorted(dealt(sampler, 4, 0)) == iota(10000));
  // 8 : 4 : 2 : 1 of 10000
  CHECK(sampler.shard_size(0) == 5333);
  CHECK(sampler.shard_size(1) == 2667);
  CHECK(sampler.shard_size(2) == 1333);
  CHECK(sampler.shard_size(3) == 667);
  CHECK(sampler.steps(0) == 533);
  const auto weights = sampler.weights();
  CHECK(weights[0] == Approx(4 * 0.5333));
  CHECK(weights[3] == Approx(4 * 0.0667));
  CHECK(std::accumulate(weights.begin(), weights.end(), 0.0) == Approx(4));
  CHECK(TrainSampler(100, {}, parse_shard_rule("uneven:5"), 1, 10, 1).shard_size(0) == 100);
}

TEST_CASE("by_label gives each rank a run of classes and covers every sample") {
  const auto labels = ten_labels(1000);
  const TrainSampler sampler(1000, labels, parse_shard_rule("by_label"), 4, 10, 1);
  CHECK(sorted(dealt(sampler, 4, 3)) == iota(1000));
  std::int32_t previous_largest = 0;
  for (int r = 0; r < 4; ++r) {
    std::set<std::int32_t> classes;
    std::vector<std::int32_t> sequence;
    for (const auto i : sampler.shard(3, r)) sequence.push_back(labels[i]);
    classes.insert(sequence.begin(), sequence.end());
    CHECK(classes.size() == 3);  // 2.5 classes of 100
    CHECK(*classes.begin() >= previous_largest);
    previous_largest = *classes.rbegin();
    CHECK_FALSE(std::is_sorted(sequence.begin(), sequence.end()));
  }
}

TEST_CASE("each rank shuffles each later round by numbers of its own") {
  const TrainSampler sampler(200, {}, {}, 2, 100, 4);  // a batch is a round
  for (int rank = 0; rank < 2; ++rank) {
    const auto order = sampler.epoch(3, rank);
    CHECK(order(0) == sampler.shard(3, rank));
    const CounterRng rng(4, RngUse::shuffle, 3, static_cast<std::uint32_t>(rank) + 1);
    for (std::uint64_t round = 1; round < 4; ++round) {
      auto expected = sampler.shard(3, rank);
      for (std::size_t i = expected.size(); i > 1; --i)
        std::swap(expected[i - 1], expected[rng.below((round << 32) + i, static_cast<std::uint32_t>(i))]);
      CHECK(order(static_cast<std::int64_t>(round)) == expected);
    }
  }
}

TEST_CASE("a batch that crosses the end of a round, or is larger than the shard, is full") {
  const TrainSampler crossing(28, {}, parse_shard_rule("uneven:3"), 2, 4, 4);  // shards of 21 and 7
  REQUIRE(crossing.shard_size(1) == 7);
  const auto order = crossing.epoch(0, 1);
  std::vector<std::int64_t> all;
  for (int step = 0; step < 7; ++step) {
    const auto batch = order(step);
    CHECK(batch.size() == 4);
    all.insert(all.end(), batch.begin(), batch.end());
  }
  for (int round = 0; round < 4; ++round)
    CHECK(sorted({all.begin() + 7 * round, all.begin() + 7 * round + 7}) == sorted(crossing.shard(0, 1)));

  const TrainSampler small(6, {}, {}, 2, 10, 4);
  CHECK(small.steps(0) == 1);
  const auto batch = small.epoch(0, 0)(0);
  CHECK(batch.size() == 10);
  CHECK(std::set<std::int64_t>(batch.begin(), batch.end()).size() == 3);
}

TEST_CASE("an epoch that other numbers of ranks began takes none of its samples twice") {
  const auto take = [](std::vector<std::int64_t>& taken, int ranks, const std::vector<Dealt>& dealt,
                       std::int64_t most) {
    TrainSampler sampler(50, {}, parse_shard_rule("even"), ranks, 2, 7);
    const std::int64_t steps = sampler.steps(0), left = sampler.enter(3, dealt);
    for (int rank = 0; rank < ranks; ++rank)
      for (std::int64_t step = steps - left; step < std::min(steps, steps - left + most); ++step)
        for (const std::int64_t sample : sampler.epoch(3, rank)(step)) taken.push_back(sample);
    CHECK(sampler.epoch(4, 0)(0) ==
          TrainSampler(50, {}, parse_shard_rule("even"), ranks, 2, 7).epoch(4, 0)(0));
    return left;
  };
  std::vector<std::int64_t> taken;
  CHECK(take(taken, 3, {}, 2) == 8);                         // 12 of 50
  CHECK(take(taken, 4, {{3, 2}}, 1) == 4);                   // 8 of 38, in shards of 9
  CHECK(take(taken, 2, {{3, 2}, {4, 1}}, 3) == 7);           // 12 of 30
  CHECK(take(taken, 1, {{3, 2}, {4, 1}, {2, 3}}, 99) == 9);  // all 18
  std::sort(taken.begin(), taken.end());
  std::vector<std::int64_t> all(50);
  std::iota(all.begin(), all.end(), 0);
  CHECK(taken == all);

  // Samplers that cannot tell go by the number of batches.
  LengthSampler lengths(48, 2, 2, 7);
  CHECK(lengths.enter(1, {}) == 12);
  CHECK(lengths.enter(1, {{3, 3}}) == 7);
  CHECK(lengths.enter(1, {{3, 99}}) == 0);
}

TEST_CASE("evaluation counts every sample once for any number of ranks and any batch") {
  for (const std::int64_t size : {0, 1, 5, 64, 103})
    for (const int ranks : {1, 2, 3, 8})
      for (const int batch : {1, 4, 100}) {
        const EvalSampler sampler(size, ranks, batch);
        std::vector<std::int64_t> all;
        for (int r = 0; r < ranks; ++r)
          for (std::int64_t step = 0; step < sampler.steps(r); ++step) {
            const auto part = sampler.epoch(0, r)(step);
            CHECK(!part.empty());
            CHECK(static_cast<int>(part.size()) <= batch);
            all.insert(all.end(), part.begin(), part.end());
          }
        CHECK(all == iota(size));
      }
}

TEST_CASE("shard rules are read, and wrong ones, too few samples and missing labels are the user's errors") {
  CHECK(parse_shard_rule("even") == ShardRule{});
  CHECK(parse_shard_rule("uneven:2.5") == ShardRule{ShardRule::Kind::uneven, 2.5});
  CHECK(parse_shard_rule("by_label").kind == ShardRule::Kind::by_label);
  for (const char* wrong : {"", "odd", "uneven", "uneven:", "uneven:0.5", "uneven:x", "uneven:2x",
                            "uneven:nan", "uneven:inf", "by_label:2"})
    CHECK_USER_ERROR(parse_shard_rule(wrong), "data.shard");
  CHECK_THROWS_AS(TrainSampler(3, {}, {}, 4, 1, 1), UserError);
  CHECK_THROWS_AS(TrainSampler(20, {}, parse_shard_rule("uneven:1000"), 4, 1, 1), UserError);
  CHECK_THROWS_AS(TrainSampler(20, {}, parse_shard_rule("by_label"), 2, 1, 1), UserError);
  CHECK_THROWS_AS(TrainSampler(20, {}, {}, 2, 0, 1), UserError);
}

TEST_CASE("a length sampler's steps are neighbours in length, each sample at most once per epoch") {
  constexpr int kRanks = 3;
  const LengthSampler sampler(100, kRanks, 4, 7);
  REQUIRE(sampler.steps(0) == 8);
  constexpr int kEpochs = 2000;
  std::vector<int> left_out(100, kEpochs);  // how often
  for (std::int64_t number = 0; number < kEpochs; ++number) {
    std::vector<EpochOrder> orders;
    for (int rank = 0; rank < kRanks; ++rank) orders.push_back(sampler.epoch(number, rank));
    std::set<std::int64_t> seen;
    for (std::int64_t step = 0; step < 8; ++step) {
      std::set<std::int64_t> of_step;
      for (const EpochOrder& order : orders)
        for (const std::int64_t sample : order(step)) {
          REQUIRE((sample >= 0 && sample < 100));
          of_step.insert(sample);
          --left_out[sample];
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

TEST_CASE("a length sampler begins with the shortest, then takes an order by seed and epoch") {
  const LengthSampler sampler(100, 2, 5, 7), same(100, 2, 5, 7), other(100, 2, 5, 8);
  const auto first = sampler.samples(0);
  CHECK(std::is_sorted(first.begin(), first.end()));
  CHECK(sampler.samples(1) == same.samples(1));
  CHECK(sampler.samples(1) != other.samples(1));
  CHECK(sampler.samples(1) != sampler.samples(2));
  CHECK(sampler.samples(1) != first);
  CHECK_USER_ERROR(LengthSampler(9, 2, 5, 1), "data.batch_size", "9 samples", "2 ranks with 5 each");
}

TEST_CASE("a global batch is shared by any number of ranks as evenly as it goes, each sample once") {
  const std::int64_t samples = 50, size = 8, batch = 2;
  const std::vector<std::int64_t> order = epoch_permutation(samples, 7, 3);
  for (const int ranks : {1, 2, 3, 5, 8}) {
    GlobalBatchSampler sampler(samples, 0, size, ranks, batch, 7);
    INFO(ranks << " ranks");
    const int batches = sampler.batches_per_step(99);
    CHECK(sampler.steps(0) == 6 * batches);
    const std::vector<float> weights = sampler.weights();
    for (std::int64_t step = 0; step < 6; ++step) {
      std::vector<std::int64_t> taken;
      for (int rank = 0; rank < ranks; ++rank) {
        const EpochOrder epoch = sampler.epoch(3, rank);
        std::size_t own = 0;
        float shares = 0;
        for (int part = 0; part < batches; ++part) {
          const std::vector<std::int64_t> some = epoch(step * batches + part);
          CHECK((!some.empty() && static_cast<std::int64_t>(some.size()) <= batch));
          taken.insert(taken.end(), some.begin(), some.end());
          own += some.size(), shares += sampler.share(rank, part, batches);
        }
        CHECK(own - size / ranks <= 1);
        CHECK(shares == Approx(1));
        // Weight, share and the mean over the ranks count each sample alike.
        CHECK(weights[static_cast<std::size_t>(rank)] == Approx(static_cast<double>(own) * ranks / size));
      }
      CHECK(taken ==
            std::vector<std::int64_t>(order.begin() + step * size, order.begin() + (step + 1) * size));
    }
    CHECK(sampler.enter(3, {{1, 16}}) == 4 * batches);
    CHECK(sampler.enter(3, {{1, 17}}) == 3 * batches);  // the third step has one of them
    CHECK(sampler.enter(3, {{1, 17}, {1, 40}}) == 0);
  }
  CHECK(GlobalBatchSampler(50, 0, 4, 3, 1, 1).batches_per_step(1) == 1);  // no rank has an empty batch
  CHECK_THROWS_AS(GlobalBatchSampler(50, 0, 4, 5, 1, 1), UserError);
  CHECK_THROWS_AS(GlobalBatchSampler(3, 0, 4, 2, 1, 1), UserError);
}

TEST_CASE("windows of a global batch are drawn alike for any number of ranks") {
  const auto drawn = [](int ranks) {
    std::vector<std::int64_t> starts;
    const GlobalBatchSampler sampler(100, 900, 6, ranks, 2, 5);
    for (std::int64_t step = 0; step < 16; ++step)
      for (int rank = 0; rank < ranks; ++rank)
        for (int part = 0; part < sampler.batches_per_step(1); ++part)
          for (const std::int64_t start : sampler.epoch(2, rank)(step * sampler.batches_per_step(1) + part))
            starts.push_back(start);
    return starts;
  };
  const std::vector<std::int64_t> one = drawn(1);
  CHECK(one.size() == 96);
  CHECK(*std::ranges::max_element(one) < 900);
  CHECK(std::set(one.begin(), one.end()).size() > 80);
  for (const int ranks : {2, 3, 4, 6}) CHECK(drawn(ranks) == one);
}
