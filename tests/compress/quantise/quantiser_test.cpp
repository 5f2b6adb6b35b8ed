// signSGD, QSGD and TernGrad: their rounding, their error feedback, and what a step leaves behind.
#include <omp.h>

#include <cmath>
#include <limits>

#include "compress/parallel.h"
#include "compress/quantise/compressor.h"
#include "nn/base/check.h"
#include "tests/compress/lowrank/lowrank_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

const std::string kMethods[] = {"signsgd", "qsgd", "terngrad"};

CompressOptions quantised(const std::string& name) {
  CompressOptions options = named(name);
  options.seed = 11;
  options.set("bucket", 128);
  return options;
}

void fill(SimulatedRanks& ranks, std::uint32_t step, std::size_t n) {
  for (std::uint32_t r = 0; r < ranks.size(); ++r) ranks[r].gradient = normal_vector(step, r, n);
}

// What one rank sends of x in each of `steps` steps, entry by entry: the mean, and its standard error by the
// sample.
struct Sample {
  std::vector<double> mean, error;
};
Sample sample(const CompressOptions& options, const GroupSpec& spec, const std::vector<float>& x, int steps) {
  SimulatedRanks ranks(options, spec);
  std::vector<double> sum(x.size()), squares(x.size());
  for (int step = 0; step < steps; ++step) {
    ranks[0].gradient = x;
    if (!ranks.step(step, 1.0)) throw Error("a step that is not finite");
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double value = static_cast<double>(ranks[0].average[i]);
      sum[i] += value;
      squares[i] += value * value;
    }
  }
  Sample result;
  const double n = steps;
  for (std::size_t i = 0; i < x.size(); ++i) {
    result.mean.push_back(sum[i] / n);
    result.error.push_back(std::sqrt(std::max(0.0, squares[i] / n - sum[i] * sum[i] / (n * n)) / n));
  }
  return result;
}

}  // namespace

TEST_CASE("uniform numbers made many at a time are those of the generator") {
  const CounterRng rng(0x123456789abcull, RngUse::compress, 7, 3);
  for (const std::uint64_t first : {0ull, 1ull, 6ull, 0x3fffffffeull})
    for (const std::size_t count : {1u, 63u, 64u, 200u}) {
      std::vector<float> made(count);
      quantise::uniforms(0x123456789abcull, (std::int64_t{5} << 32) + 7, 3, first, count, made.data());
      for (std::size_t i = 0; i < count; ++i) REQUIRE(made[i] == rng.uniform(first + i));
    }
}

TEST_CASE("signsgd sends the mean magnitude with each sign, and zero as plus") {
  GroupSpec spec = whole_group(6, 1);
  spec.segments = {{0, 4}, {4, 6}};
  SimulatedRanks ranks(quantised("signsgd"), spec);
  ranks[0].gradient = {1.0f, -3.0f, 0.0f, -0.0f, 5.0f, -7.0f};
  REQUIRE(ranks.step(0, 1.0));
  CHECK(ranks[0].gradient == std::vector<float>{1, -1, 1, 1, 6, -6});
  CHECK(ranks[0].residual == std::vector<float>{0, -2, -1, -1, -1, -1});
  // u = {1, -5, -1, -1 | -1, -1}: error feedback corrects the sign of zeros.
  ranks[0].gradient = {1.0f, -3.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  REQUIRE(ranks.step(1, 1.0));
  CHECK(ranks[0].gradient == std::vector<float>{2, -2, -2, -2, -1, -1});
  CHECK(ranks[0].residual == std::vector<float>{-1, -3, 1, 1, 0, 0});
}

TEST_CASE("signsgd's error shrinks as its paper has it: |u - C(u)|^2 = (1 - |u|_1^2 / (d |u|_2^2)) |u|^2") {
  const std::size_t n = 5000;
  SimulatedRanks ranks(quantised("signsgd"), whole_group(n, 1));
  const auto u = ranks[0].gradient = normal_vector(3, 0, n);
  double l1 = 0;
  for (const float x : u) l1 += std::abs(static_cast<double>(x));
  REQUIRE(ranks.step(0, 1.0));
  const double square = norm(u) * norm(u), left = norm(ranks[0].residual);
  CHECK(left * left == Approx((1 - l1 * l1 / (static_cast<double>(n) * square)) * square).epsilon(1e-5));
}

TEST_CASE("qsgd and terngrad without clipping are unbiased, with the variance of their formulas") {
  const std::size_t n = 40;
  const int steps = 4000;
  std::vector<float> x = normal_vector(4, 0, n);
  x[3] = 0, x[7] = 1e-3f;
  for (const std::string name : {"qsgd", "terngrad"})
    for (const int levels : {1, 3, 127}) {
      INFO(name << ", " << levels << " levels");
      CompressOptions options = quantised(name);
      options.set("levels", levels);
      options.set("bucket", 16);
      options.set("clip_sigma", 0);
      const Sample sent = sample(options, whole_group(n, 1), x, steps);
      for (std::size_t i = 0; i < n; ++i) {
        // Of a value between two neighbours a step apart, with the fraction f: step^2 f (1 - f).
        double gap = 0;
        if (name == "qsgd") {
          for (std::size_t j = i / 16 * 16; j < std::min(n, i / 16 * 16 + 16); ++j)
            gap += static_cast<double>(x[j]) * static_cast<double>(x[j]);
          gap = std::sqrt(gap) / levels;
        } else {
          for (const float y : x) gap = std::max(gap, std::abs(static_cast<double>(y)));
        }
        const double exact = std::abs(static_cast<double>(x[i])) / gap, f = exact - std::floor(exact);
        const double error = gap * std::sqrt(f * (1 - f) / steps);
        CHECK(std::abs(sent.mean[i] - static_cast<double>(x[i])) <= 4 * error + 1e-6 * gap);
        if (f > 0.05 && f < 0.95) CHECK(sent.error[i] == Approx(error).epsilon(0.15));
      }
    }
}

TEST_CASE("terngrad clips at standard deviations about the mean, and sends -s, 0 or s") {
  std::vector<float> x(101, 0.5f);
  for (std::size_t i = 0; i < 100; ++i) x[i] = i % 2 ? 1.0f : -1.0f;
  x[100] = 50.0f;
  // Of the population: mean 50 / 101, E x^2 = (100 + 2500) / 101.
  const double mean = 50.0 / 101, sigma = std::sqrt(2600.0 / 101 - mean * mean);
  SimulatedRanks ranks(quantised("terngrad"), whole_group(101, 1));
  const float s = static_cast<float>(2.5 * sigma);
  for (int step = 0; step < 20; ++step) {
    ranks[0].gradient = x;
    REQUIRE(ranks.step(step, 1.0));
    for (std::size_t i = 0; i < 100; ++i) {
      const float value = ranks[0].average[i];
      CHECK((value == 0 || value == Approx(x[i] * s)));
    }
    CHECK(ranks[0].average[100] == Approx(s));
  }
}

TEST_CASE("random rounding draws by step, rank and place in the model, not by group") {
  for (const std::string name : {"qsgd", "terngrad"}) {
    CompressOptions options = quantised(name);
    options.set("levels", 2);
    options.set("clip_sigma", 0);
    options.set("bucket", 8);
    GroupSpec shifted = whole_group(64, 2);
    SimulatedRanks a(options, shifted), b(options, shifted);
    shifted.offset = 8;
    SimulatedRanks c(options, shifted);
    std::vector<float> x(64, 0.3f);
    x[63] = 0.7f;  // the same scale for terngrad, whose other entries are then drawn
    for (auto* ranks : {&a, &b, &c})
      for (std::size_t r = 0; r < 2; ++r) (*ranks)[r].gradient = x;
    REQUIRE(a.step(0, 1.0));
    REQUIRE(b.step(1, 1.0));
    REQUIRE(c.step(0, 1.0));
    CHECK(a.blocks()[0] != a.blocks()[1]);
    CHECK(a.blocks()[0] != b.blocks()[0]);
    // Equal entries, rounded alike at one place in the model.
    CHECK(std::equal(a[0].average.begin() + 8, a[0].average.begin() + 56, c[0].average.begin()));
  }
}

TEST_CASE("quantised contributions are averaged with their weights, in rank order") {
  for (const std::string& name : kMethods) {
    INFO(name);
    const std::size_t n = 3000;
    const GroupSpec spec = whole_group(n, 3);
    std::vector<std::vector<float>> sent;
    for (std::uint32_t r = 0; r < 3;
         ++r) {  // each rank's own values, from a group whose other ranks send zeros
      SimulatedRanks alone(quantised(name), spec);
      alone[r].gradient = normal_vector(0, r, n);
      std::vector<float> weights(3, 0.0f);
      weights[r] = 3.0f;
      REQUIRE(alone.step(0, 1.0, weights));
      sent.push_back({alone[0].average.begin(), alone[0].average.end()});
    }
    SimulatedRanks ranks(quantised(name), spec);
    fill(ranks, 0, n);
    REQUIRE(ranks.step(0, 1.0, {0.5f, 1.5f, 1.0f}));
    for (std::size_t i = 0; i < n; ++i) {
      const float plain = (0.5f * sent[0][i] + 1.5f * sent[1][i] + sent[2][i]) / 3.0f;
      CHECK(ranks[0].average[i] == Approx(plain).margin(1e-6));
    }
    for (std::size_t r = 1; r < 3; ++r) CHECK(same_bits<float>(ranks[r].average, ranks[0].average));
  }
}

TEST_CASE(
    "with memory, what a quantiser did not deliver is its residual; without, the spare is not touched") {
  const std::size_t n = 5000;
  for (const std::string& name : kMethods)
    for (const std::string memory : {"residual", "none"}) {
      if (name == "terngrad" && memory == "residual") continue;
      INFO(name << " with memory " << memory);
      CompressOptions options = quantised(name);
      options.memory = memory;
      SimulatedRanks ranks(options, whole_group(n, 2));
      for (std::uint32_t step = 0; step < 10; ++step) {
        fill(ranks, step, n);
        std::vector<double> u(n), after(n);
        for (std::size_t i = 0; i < n; ++i)
          for (std::size_t r = 0; r < 2; ++r)
            u[i] += static_cast<double>(ranks[r].gradient[i]) + static_cast<double>(ranks[r].residual[i]);
        REQUIRE(ranks.step(step, 1.0));
        for (std::size_t i = 0; i < n; ++i)
          after[i] = 2.0 * static_cast<double>(ranks[0].average[i]) +
                     static_cast<double>(ranks[0].residual[i]) + static_cast<double>(ranks[1].residual[i]);
        if (memory == "residual")
          CHECK(distance(after, u) <= 1e-6 * norm(u));
        else
          CHECK(ranks[0].residual == std::vector<float>(n));
      }
    }
}

TEST_CASE("qsgd takes error feedback only where rounding takes more away than it adds; terngrad never") {
  CompressOptions options = quantised("qsgd");
  options.memory = "residual";
  options.set("levels", 12);
  options.set("bucket", 128);  // 128 / 144 < 1
  CHECK_NOTHROW(make_compressor(options, whole_group(10, 1)));
  options.set("levels", 11);  // 128 / 121 and 11.3 / 11 are above 1
  CHECK_THROWS_AS(make_compressor(options, whole_group(10, 1)), UserError);
  options.set("levels", 16), options.set("bucket", 256);  // as much as it adds
  CHECK_THROWS_AS(make_compressor(options, whole_group(10, 1)), UserError);
  options = quantised("terngrad");
  options.memory = "residual";
  CHECK_THROWS_AS(make_compressor(options, whole_group(10, 1)), UserError);
}

TEST_CASE("quantisers deliver zeros, denormals and single entries, and skip what is not finite") {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (const std::string& name : kMethods) {
    INFO(name);
    CompressOptions options = quantised(name);
    options.set("levels", 1);
    for (const float value : {0.0f, -0.25f, tiny, -3.0f * tiny, 1e30f}) {
      SimulatedRanks one(options, whole_group(1, 1));
      one[0].gradient = {value};
      REQUIRE(one.step(0, 1.0));
      CHECK(one[0].average[0] == value);
    }
    SimulatedRanks none(options, GroupSpec{0, {}, 2});
    CHECK(none.step(0, 1.0));
    for (const float bad : {nan, inf, -inf}) {
      SimulatedRanks ranks(options, whole_group(300, 2));
      fill(ranks, 0, 300);
      ranks[1].gradient[299] = bad;
      const auto residual = ranks[1].residual;
      CHECK_FALSE(ranks.step(0, 1.0));
      CHECK(ranks.blocks()[1].size() == 20);
      CHECK(same_bits(ranks[1].residual, residual));
      fill(ranks, 0, 300);
      CHECK(ranks.step(0, 1.0));
    }
  }
  SimulatedRanks huge(quantised("qsgd"), whole_group(8, 1));
  huge[0].gradient.assign(8, 3e38f);  // a norm beyond float
  CHECK_FALSE(huge.step(0, 1.0));
}

TEST_CASE("quantised results do not depend on the number of threads") {
  const std::size_t n = 300001;
  REQUIRE(n / 3 > 4 * kChunk);
  for (const std::string& name : kMethods)
    for (const int levels : {3, 127}) {
      if (name != "qsgd" && levels == 3) continue;
      CompressOptions options = quantised(name);
      options.set("levels", levels);
      options.set("bucket", 100);
      std::vector<std::vector<std::byte>> blocks;
      std::vector<std::vector<float>> averages;
      for (const int threads : {1, 3}) {
        const int before = omp_get_max_threads();
        omp_set_num_threads(threads);
        SimulatedRanks ranks(options, whole_group(n, 2));
        fill(ranks, 0, n);
        CHECK(ranks.step(0, 1.0));
        omp_set_num_threads(before);
        blocks.push_back(ranks.blocks()[0]);
        averages.push_back(ranks[1].gradient);
        CHECK(blocks.back().size() == planned_message_bytes(options, whole_group(n, 2), 1.0));
        CHECK(ranks[0].compressor->selected() == n);
      }
      CHECK(blocks[0] == blocks[1]);
      CHECK(same_bits(averages[0], averages[1]));
    }
}

TEST_CASE("terngrad does not clip above the largest magnitude") {
  CompressOptions options = quantised("terngrad");
  options.set("clip_sigma", 100);
  SimulatedRanks ranks(options, whole_group(4, 1));
  ranks[0].gradient = {1.0f, -3.0f, 2.0f, 0.5f};
  REQUIRE(ranks.step(0, 1.0));
  CHECK(ranks[0].average[1] == -3);  // the largest is sent for certain
}

TEST_CASE("qsgd's norm is rounded up, so that no entry exceeds it") {
  CompressOptions options = quantised("qsgd");
  options.set("levels", 1);
  SimulatedRanks ranks(options, whole_group(2, 1));
  ranks[0].gradient = {1.0f, 1e-5f};  // the norm is 1 + 5e-11
  REQUIRE(ranks.step(0, 1.0));
  CHECK(ranks[0].average[0] == std::nextafter(1.0f, 2.0f));
}
