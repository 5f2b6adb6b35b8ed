// EF21: differences to an estimate are sent, and the estimate is stepped along.
#include "compress/memory/memory.h"
#include "compress/state.h"
#include "tests/compress/simulated_ranks.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

CompressOptions with_memory(const std::string& memory) {
  return named("topk", {"memory=" + memory});
}

// Ranks with different quadratics f_r(w) = sum_j a_rj (w_j - c_rj)^2 / 2, whose mean has its minimum at
// sum_r a c / sum_r a. Returns the greatest distance to it after `steps` of gradient descent.
double distance_to_optimum(const std::string& memory, int steps) {
  constexpr std::size_t d = 20, ranks = 4;
  SimulatedRanks steppers(with_memory(memory), whole_group(d, ranks));
  std::vector<std::vector<float>> a(ranks), c(ranks);
  for (std::uint32_t r = 0; r < ranks; ++r) {
    a[r] = noise(d, r);
    for (float& x : a[r]) x = 0.5f + x * x / (1 + x * x);
    c[r] = noise(d, 10 + r);
    for (float& x : c[r]) x *= 10;  // far apart: a rank's gradient does not vanish at the optimum
  }
  std::vector<double> w(d);
  for (int t = 0; t < steps; ++t) {
    for (std::size_t r = 0; r < ranks; ++r)
      for (std::size_t j = 0; j < d; ++j)
        steppers[r].gradient[j] = static_cast<float>(a[r][j] * (w[j] - c[r][j]));
    REQUIRE(steppers.step(t, 0.1));
    for (std::size_t j = 0; j < d; ++j) w[j] -= 0.05 * static_cast<double>(steppers[0].average[j]);
  }
  double distance = 0;
  for (std::size_t j = 0; j < d; ++j) {
    double weighted = 0, sum = 0;
    for (std::size_t r = 0; r < ranks; ++r)
      weighted += static_cast<double>(a[r][j]) * static_cast<double>(c[r][j]),
          sum += static_cast<double>(a[r][j]);
    distance = std::max(distance, std::abs(w[j] - weighted / sum));
  }
  return distance;
}

}  // namespace

TEST_CASE("ranks that differ reach the exact optimum with EF21, and stay away from it without a memory") {
  CHECK(distance_to_optimum("ef21", 3000) < 1e-5);
  CHECK(distance_to_optimum("none", 3000) > 0.1);
  CHECK(distance_to_optimum("residual", 3000) > 1e-4);  // near, and moving about
}

TEST_CASE("the estimate is the weighted mean of what all ranks hold, at all times") {
  const std::size_t d = 3000, ranks = 3;
  const bool weighted = GENERATE(false, true);
  const std::vector<float> weights =
      weighted ? std::vector<float>{0.5f, 1, 1.5f} : std::vector<float>{1, 1, 1};
  SimulatedRanks steppers(with_memory("ef21"), whole_group(d, ranks));
  std::vector<std::vector<float>> h(ranks, std::vector<float>(d));  // by the paper's formula
  for (std::uint32_t t = 0; t < 20; ++t) {
    std::vector<std::vector<float>> g(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) steppers[r].gradient = g[r] = noise(d, 3 * t + r);
    REQUIRE(steppers.step(t, 0.01, weights));
    for (std::size_t r = 0; r < ranks; ++r) {
      const SparseVector& sent = steppers.sent()[r];
      REQUIRE(sent.indices.size() == (t == 0 ? d : 30));
      for (std::size_t i = 0; i < sent.indices.size(); ++i) {
        const std::uint32_t at = sent.indices[i];
        REQUIRE(sent.values[i] == g[r][at] - h[r][at]);
        h[r][at] += sent.values[i];
      }
      for (std::size_t i = 0; i < d; ++i) REQUIRE(steppers[r].residual[i] == -h[r][i]);
    }
    for (std::size_t i = 0; i < d; ++i) {
      double mean = 0;
      for (std::size_t r = 0; r < ranks; ++r)
        mean += static_cast<double>(weights[r]) * static_cast<double>(h[r][i]) / ranks;
      REQUIRE(steppers[0].average[i] == Approx(mean).epsilon(1e-5).margin(1e-6));
    }
  }
}

TEST_CASE("the first committed step sends the whole gradient, also after steps that were skipped") {
  SimulatedRanks ranks(with_memory("ef21"), whole_group(500, 2));
  const auto fill = [&](std::uint32_t stream) {
    for (std::uint32_t p = 0; p < 2; ++p) {
      const std::vector<float> g = noise(500, stream + p);
      ranks[p].gradient.assign(g.begin(), g.end());
    }
  };
  fill(0);
  ranks[1].gradient[7] = std::numeric_limits<float>::quiet_NaN();
  REQUIRE_FALSE(ranks.step(0, 0.01));
  fill(2);
  REQUIRE_FALSE(ranks.step(0, 0.01, {}, false));
  fill(4);
  const std::vector<float> a = ranks[0].gradient, b = ranks[1].gradient;
  REQUIRE(ranks.step(0, 0.01));
  CHECK(ranks[0].compressor->diagnostics().selected == 500);
  for (std::size_t i = 0; i < 500; ++i) REQUIRE(ranks[0].average[i] == (a[i] + b[i]) * 0.5f);
  fill(6);
  REQUIRE(ranks.step(1, 0.01));
  CHECK(ranks[0].compressor->diagnostics().selected == 5);
}

TEST_CASE("a step that would make the estimate infinite is not finite on any rank, and changes nothing") {
  SimulatedRanks ranks(with_memory("ef21"), whole_group(4, 2));
  const auto step = [&](std::int64_t number, float gradient, float weight) {
    ranks[0].gradient = {gradient, 1, 1, 1};
    ranks[1].gradient = {0, 1, 1, 1};
    return ranks.step(number, 1, {weight, 2 - weight});
  };
  // The estimate rises where the first rank counts more, and hardly falls where it counts less.
  int steps = 0;
  while (steps < 12 && step(steps, steps % 2 ? -0.8e38f : 0.8e38f, steps % 2 ? 0.1f : 1.9f)) ++steps;
  REQUIRE(steps == 4);
  for (std::size_t r = 0; r < 2; ++r) CHECK_FALSE(ranks[r].compressor->finite());
  REQUIRE(step(5, -0.8e38f, 1));
  CHECK(std::isfinite(ranks[0].average[0]));
  CHECK(ranks[0].average[1] == Approx(1));
}

TEST_CASE(
    "EF21 refuses a state that has an estimate before its first step, or one of another length or of NaNs") {
  const auto memory = make_memory("ef21");
  const auto load = [&](std::uint8_t first, const std::vector<float>& estimate, std::size_t range = 0) {
    StateWriter writer;
    writer.put(first);
    writer.put_list(estimate);
    const std::vector<std::byte> bytes = writer.take();
    StateReader reader(bytes);
    reader.range = range;
    memory->load(reader);
  };
  CHECK_NOTHROW(load(1, {}, 2));
  CHECK_NOTHROW(load(0, {1, 2}, 2));
  CHECK_THROWS_AS(load(0, {1, 2}, 3), Error);
  CHECK_THROWS_AS(load(0, {1, std::numeric_limits<float>::quiet_NaN()}, 2), Error);
  CHECK_THROWS_AS(load(1, {1, 2}), Error);
  CHECK_THROWS_AS(load(2, {}), Error);
}
