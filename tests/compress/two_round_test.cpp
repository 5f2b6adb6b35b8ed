// A compressor of two rounds, both sums, with state of its own: rank-1 PowerSGD (Vogels, Karimireddy, Jaggi,
// NeurIPS 2019) for one matrix. It proves that the interface carries such methods with nothing added.
#include <algorithm>
#include <cmath>
#include <limits>

#include "nn/core/rng.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

class RankOne final : public Compressor {
 public:
  RankOne(std::size_t rows, std::size_t columns, int ranks)
      : rows_(rows), columns_(columns), ranks_(ranks), start_(columns, 1.0f), p_(rows), q_(columns) {}

  Message encode(Slice slice, const StepContext&) override {
    slice_ = slice;
    for (std::size_t i = 0; i < slice.gradient.size(); ++i) slice.gradient[i] += slice.residual[i];
    round_ = 0;
    finite_ = true;
    std::fill(p_.begin(), p_.end(), 0.0f);
    for (std::size_t i = 0; i < rows_; ++i)
      for (std::size_t j = 0; j < columns_; ++j) p_[i] += slice.gradient[i * columns_ + j] * start_[j];
    return sum_of(p_);
  }

  std::optional<Message> decode(const Round& round) override {
    for (const float x : round.sum) finite_ &= std::isfinite(x);
    if (++round_ == 2) return std::nullopt;
    float norm = 0;
    for (const float x : p_) norm += x * x;
    for (float& x : p_) x /= std::sqrt(norm) + 1e-30f;
    std::fill(q_.begin(), q_.end(), 0.0f);
    for (std::size_t i = 0; i < rows_; ++i)
      for (std::size_t j = 0; j < columns_; ++j) q_[j] += slice_.gradient[i * columns_ + j] * p_[i];
    return sum_of(q_);
  }

  bool finite() const override { return finite_; }

  std::span<float> commit(std::span<const std::uint32_t>) override {
    for (std::size_t i = 0; i < rows_; ++i)
      for (std::size_t j = 0; j < columns_; ++j) {
        const std::size_t at = i * columns_ + j;
        slice_.residual[at] = p_[i] * q_[j] / static_cast<float>(ranks_);
        slice_.gradient[at] -= slice_.residual[at];
      }
    start_ = q_;  // the next step's power iteration starts here
    return slice_.residual;
  }

  void discard() override {}

 private:
  static Message sum_of(std::vector<float>& values) {
    Message message;
    message.kind = Message::Kind::sum;
    message.sum = values;
    return message;
  }
  std::size_t rows_, columns_;
  int ranks_;
  std::vector<float> start_, p_, q_;
  Slice slice_;
  int round_ = 0;
  bool finite_ = false;
};

constexpr std::size_t kRows = 6, kColumns = 5, kCount = kRows * kColumns;

SimulatedRanks make_ranks(std::size_t count) {
  std::vector<std::unique_ptr<Compressor>> compressors;
  for (std::size_t r = 0; r < count; ++r)
    compressors.push_back(std::make_unique<RankOne>(kRows, kColumns, static_cast<int>(count)));
  return SimulatedRanks(std::move(compressors), kCount);
}

void fill(SimulatedRanks& ranks, std::uint32_t t) {
  for (std::uint32_t r = 0; r < ranks.size(); ++r) {
    const CounterRng rng(47, RngUse::test, t, r);
    for (std::size_t i = 0; i < kCount; ++i) ranks[r].gradient[i] = rng.normal(i);
  }
}

}  // namespace

TEST_CASE("a two-round compressor averages a rank-one gradient in one step") {
  SimulatedRanks ranks = make_ranks(3);
  for (std::size_t r = 0; r < 3; ++r)
    for (std::size_t i = 0; i < kCount; ++i)
      ranks[r].gradient[i] = (1.0f + static_cast<float>(i / kColumns)) *
                             (2.0f + static_cast<float>(i % kColumns)) * static_cast<float>(r);
  REQUIRE(ranks.step(0, 1.0));
  for (std::size_t r = 0; r < 3; ++r) {
    CHECK(same_bits(ranks[r].gradient, ranks[0].gradient));
    for (std::size_t i = 0; i < kCount; ++i)
      CHECK(ranks[r].average[i] ==
            Approx((1.0f + static_cast<float>(i / kColumns)) * (2.0f + static_cast<float>(i % kColumns)))
                .epsilon(1e-5));
  }
}

TEST_CASE("a two-round compressor's error feedback delivers in time what one step leaves out") {
  SimulatedRanks ranks = make_ranks(2);
  std::vector<double> given(kCount), delivered(kCount);
  for (std::uint32_t t = 0; t < 40; ++t) {
    fill(ranks, t);
    for (std::size_t r = 0; r < 2; ++r)
      for (std::size_t i = 0; i < kCount; ++i) given[i] += ranks[r].gradient[i] / 2.0;
    REQUIRE(ranks.step(t, 1.0));
    for (std::size_t i = 0; i < kCount; ++i) delivered[i] += ranks[0].average[i];
  }
  for (std::size_t i = 0; i < kCount; ++i) {
    const double kept = (ranks[0].residual[i] + ranks[1].residual[i]) / 2.0;
    CHECK(delivered[i] + kept == Approx(given[i]).margin(1e-4));
  }
}

TEST_CASE("a two-round compressor's skipped step changes nothing") {
  SimulatedRanks skipped = make_ranks(2), straight = make_ranks(2);
  for (std::uint32_t t = 0; t < 6; ++t) {
    if (t % 2) {
      fill(skipped, 100 + t);
      skipped[1].gradient[3] = std::numeric_limits<float>::quiet_NaN();
      REQUIRE_FALSE(skipped.step(t, 1.0));
    }
    fill(skipped, t);
    fill(straight, t);
    REQUIRE(skipped.step(t, 1.0));
    REQUIRE(straight.step(t, 1.0));
    for (std::size_t r = 0; r < 2; ++r) {
      CHECK(same_bits(skipped[r].gradient, straight[r].gradient));
      CHECK(same_bits(skipped[r].residual, straight[r].residual));
    }
  }
}
