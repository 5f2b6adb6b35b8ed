#include "compress/select/selector.h"

#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "compress/state.h"
#include "nn/core/rng.h"
#include "tests/compress/fixtures.h"
#include "tests/compress/select/select_once.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// The gradient of one step: independent normal; 20 layers with deviations over two decades; Laplace with a
// drift that stays.
std::vector<float> gradient(const std::string& model, std::uint32_t step, std::size_t d) {
  const CounterRng rng(31, RngUse::test, step), drift(32, RngUse::test);
  std::vector<float> g(d);
  for (std::size_t i = 0; i < d; ++i) {
    if (model == "laplace") {
      const float x = 2 * rng.uniform(i) - 1;
      g[i] = std::copysign(-std::log1p(-std::min(std::abs(x), 0.9999999f)), x) + 0.05f * drift.normal(i);
    } else {
      g[i] = rng.normal(i);
      if (model == "layers") g[i] *= std::pow(10.0f, -2.0f * static_cast<float>(i * 20 / d) / 19.0f);
    }
  }
  return g;
}

// Error feedback over steps; u is left in `residual` without what was selected.
Selection feedback_step(Selector& selector, std::vector<float>& residual, std::vector<float> g,
                        double density) {
  Selection selected = select_once(selector, g, residual, {density});
  selector.commit({});
  residual = std::move(g);
  for (const std::uint32_t i : selected.indices) residual[i] = 0;
  return selected;
}

std::vector<std::byte> saved(const Selector& selector) {
  StateWriter writer;
  selector.save(writer);
  return writer.take();
}
void restore(Selector& selector, const std::vector<std::byte>& bytes) {
  StateReader reader(bytes);
  selector.load(reader);
  reader.finish();
}

// What is saved: the threshold of the last committed step and what its counts taught.
struct Carried {
  double threshold, count, power, bias, variance;
};
Carried carried(const Selector& selector) {
  const std::vector<std::byte> bytes = saved(selector);
  Carried read;
  REQUIRE(bytes.size() == sizeof read);
  std::memcpy(&read, bytes.data(), sizeof read);
  return read;
}

// Every entry above the threshold, no other, with its value.
void check_is_threshold_selection(const Selection& selected, const std::vector<float>& u) {
  CHECK(selected.indices == positions_above(u, selected.threshold));
  CHECK(well_formed(selected, u));
}

}  // namespace

TEST_CASE("gaussiank_calibrated stays within 8 % of k under error feedback, mostly in one pass") {
  const std::string model = GENERATE("normal", "layers", "laplace");
  const double density = GENERATE(0.01, 0.001);
  INFO(model << " at " << density);
  const std::size_t d = 20000;
  const auto k = static_cast<double>(target_count(density, d));
  const auto selector = make_selector("gaussiank_calibrated");
  std::vector<float> residual(d);
  int more_passes = 0;
  double candidates = 0;
  const std::uint32_t steps = 200, warm = 60;
  for (std::uint32_t t = 0; t < steps; ++t) {
    const auto n = static_cast<double>(
        feedback_step(*selector, residual, gradient(model, t, d), density).indices.size());
    REQUIRE(std::abs(n - k) <= 0.08 * k);
    if (t < warm) continue;
    more_passes += selector->diagnostics().passes > 1;
    candidates += static_cast<double>(selector->diagnostics().candidates) / k;
  }
  CHECK(more_passes <= 7);  // 5 %
  CHECK(candidates / (steps - warm) < 2);
}

TEST_CASE("gaussiank_calibrated selects what exceeds its threshold") {
  const std::size_t d = 30000;
  const auto selector = make_selector("gaussiank_calibrated");
  std::vector<float> residual(d);
  int one_pass = 0;
  for (std::uint32_t t = 0; t < 40; ++t) {
    std::vector<float> u = gradient("laplace", t, d);
    const auto selected = select_once(*selector, u, residual, {0.01});
    if (selector->diagnostics().passes == 1) check_is_threshold_selection(selected, u);
    one_pass += selector->diagnostics().passes == 1;
    selector->commit({});
    residual = u;
    for (const std::uint32_t i : selected.indices) residual[i] = 0;
  }
  CHECK(one_pass > 30);
}

TEST_CASE("gaussiank_calibrated follows densities and gradients that change at once") {
  const std::size_t d = 20000;
  const auto selector = make_selector("gaussiank_calibrated");
  std::vector<float> residual(d);
  for (std::uint32_t t = 0; t < 180; ++t) {
    const double density = t < 30 ? 0.25 : t < 60 ? 0.0625 : t < 90 ? 0.004 : t < 120 ? 0.001 : 0.02;
    std::vector<float> g = gradient("normal", t, d);
    for (float& x : g) x *= t < 140 ? 1.0f : t < 160 ? 0.1f : 100.0f;
    const auto k = static_cast<double>(target_count(density, d));
    const auto n = static_cast<double>(feedback_step(*selector, residual, g, density).indices.size());
    INFO("step " << t);
    REQUIRE(std::abs(n - k) <= 0.08 * k);
  }
}

TEST_CASE("gaussiank_calibrated starts with the exact k") {
  std::vector<float> x = fixture("cubic");
  const auto selector = make_selector("gaussiank_calibrated");
  CHECK(select_once(*selector, x, {}, {0.01}).indices == plain_topk(x, 100));
}

TEST_CASE("gaussiank_calibrated forgets a discarded step, and goes on from its state to the bit") {
  const std::size_t d = 10000;
  const auto selector = make_selector("gaussiank_calibrated"),
             resumed = make_selector("gaussiank_calibrated");
  std::vector<float> residual(d);
  for (std::uint32_t t = 0; t < 25; ++t) feedback_step(*selector, residual, gradient("laplace", t, d), 0.01);
  const auto state = saved(*selector);
  std::vector<float> other = gradient("normal", 999, d);
  for (float& x : other) x *= 50;
  select_once(*selector, other, residual, {0.01});
  selector->discard();
  CHECK(saved(*selector) == state);

  restore(*resumed, state);
  std::vector<float> also = residual;
  bool differs_from_fresh = false;
  for (std::uint32_t t = 25; t < 60; ++t) {
    const auto g = gradient("laplace", t, d);
    std::vector<float> copy = g;
    const auto fresh = make_selector("gaussiank_calibrated");
    const auto of_fresh = select_once(*fresh, copy, residual, {0.01});
    const auto a = feedback_step(*selector, residual, g, 0.01), b = feedback_step(*resumed, also, g, 0.01);
    REQUIRE(a.indices == b.indices);
    REQUIRE(same_bits(a.values, b.values));
    differs_from_fresh |= a.indices != of_fresh.indices;
  }
  CHECK(differs_from_fresh);
  CHECK(saved(*selector) == saved(*resumed));
}

TEST_CASE("gaussiank_calibrated validates its state") {
  const auto selector = make_selector("gaussiank_calibrated");
  const auto load = [&](double threshold, double count, double power, double variance, double bias = 0) {
    StateWriter writer;
    for (const double x : {threshold, count, power, bias, variance}) writer.put(x);
    restore(*selector, writer.take());
  };
  CHECK_NOTHROW(load(0.5, 10, 2, 0.1));
  CHECK_NOTHROW(load(-1, 0, 1, 0.04));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS(load(nan, 10, 2, 0.1), Error);
  CHECK_THROWS_AS(load(-2, 10, 2, 0.1), Error);
  CHECK_THROWS_AS(load(0.5, 0, 2, 0.1), Error);
  CHECK_THROWS_AS(load(0.5, 10, 0, 0.1), Error);
  CHECK_THROWS_AS(load(0.5, 10, 2, nan), Error);
  CHECK_THROWS_AS(load(0.5, 10, 2, 0.1, -9), Error);
  CHECK(carried(*selector).threshold == -1);
  StateReader cut(std::span<const std::byte>{});
  CHECK_THROWS_AS(selector->load(cut), Error);
}

TEST_CASE("gaussiank_calibrated does not depend on the number of threads") {
  const std::size_t d = 300001;
  const int before = omp_get_max_threads();
  std::vector<std::vector<std::uint32_t>> indices;
  std::vector<std::vector<std::byte>> states;
  for (const int threads : {1, 2, 4}) {
    omp_set_num_threads(threads);
    const auto selector = make_selector("gaussiank_calibrated");
    std::vector<float> residual(d);
    indices.emplace_back();
    // The last ones list far too many entries, all of them in one thread's part.
    for (std::uint32_t t = 0; t < 8; ++t) {
      std::vector<float> g = gradient("layers", t, d);
      if (t >= 6)
        for (std::size_t i = 0; i < d / 8; ++i) g[i] *= 1000;
      const auto selected = feedback_step(*selector, residual, g, 0.001);
      indices.back().insert(indices.back().end(), selected.indices.begin(), selected.indices.end());
    }
    states.push_back(saved(*selector));
  }
  omp_set_num_threads(before);
  for (std::size_t i = 1; i < indices.size(); ++i) {
    CHECK(indices[i] == indices[0]);
    CHECK(states[i] == states[0]);
  }
}

TEST_CASE("gaussiank_calibrated sees a NaN or Inf anywhere, and selects nothing") {
  const std::size_t at = GENERATE(0u, 15u, 4097u, 9999u);
  const float bad =
      GENERATE(std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity());
  const bool first = GENERATE(true, false);
  const auto selector = make_selector("gaussiank_calibrated");
  std::vector<float> residual(10000);
  if (!first) feedback_step(*selector, residual, gradient("normal", 0, 10000), 0.01);
  const auto before = saved(*selector);
  std::vector<float> u = gradient("normal", 1, 10000);
  residual[at] = bad;
  const auto selected = select_once(*selector, u, residual, {0.01});
  CHECK_FALSE(selected.finite);
  CHECK(selected.indices.empty());
  CHECK(selected.values.empty());
  selector->discard();
  CHECK(saved(*selector) == before);
}

TEST_CASE("gaussiank_calibrated of zeros selects nothing, and recovers") {
  const auto selector = make_selector("gaussiank_calibrated");
  const std::vector<float> none;
  for (int step = 0; step < 3; ++step) {
    std::vector<float> x(5000);
    CHECK(select_once(*selector, x, none, {0.01}).indices.empty());
    selector->commit({});
  }
  std::vector<float> few(5000);  // fewer than k = 50 that are none
  few[7] = 1, few[4999] = std::numeric_limits<float>::denorm_min();
  CHECK(select_once(*selector, few, none, {0.01}).indices == std::vector<std::uint32_t>{7, 4999});
  selector->commit({});
  std::vector<float> x = fixture("cubic");
  CHECK(select_once(*selector, x, none, {0.01}).indices.size() == 100);
}

TEST_CASE("gaussiank_calibrated of equal magnitudes selects k, the lower indices") {
  const double scale = GENERATE(1.0, 1e-310, 1e300);
  const auto selector = make_selector("gaussiank_calibrated");
  const auto c = static_cast<float>(scale == 1  ? 0.1
                                    : scale < 1 ? std::numeric_limits<float>::denorm_min()
                                                : std::numeric_limits<float>::max() / 4);
  for (int step = 0; step < 4; ++step) {
    std::vector<float> x(12000);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = i % 2 ? c : -c;
    CHECK(select_once(*selector, x, {}, {0.01}).indices == plain_topk(x, 120));
    selector->commit({});
  }
  // A list whose ties no threshold can part: 300 tie above the rest, 120 are wanted.
  std::vector<float> x(12000, c / 2);
  for (std::size_t i = 0; i < 300; ++i) x[40 * i] = c;
  CHECK(select_once(*selector, x, {}, {0.01}).indices == plain_topk(x, 120));
}

TEST_CASE("gaussiank_calibrated of few elements and of high densities is exact") {
  const auto selector = make_selector("gaussiank_calibrated");
  std::vector<float> few = fixture("cubic");
  few.resize(2047);
  CHECK(select_once(*selector, few, {}, {0.01}).indices == plain_topk(few, 20));
  std::vector<float> one(1, -3.0f);
  CHECK(select_once(*selector, one, {}, {0.001}).values == std::vector<float>{-3.0f});
  std::vector<float> x = fixture("p9");
  CHECK(select_once(*selector, x, {}, {0.7}).indices == plain_topk(x, target_count(0.7, x.size())));
  CHECK(select_once(*selector, x, {}, {1.0}).indices == plain_topk(x, x.size()));
  CHECK(select_once(*selector, x, {}, {1e-6}).indices == plain_topk(x, 1));
}

TEST_CASE("a step in which k changes much teaches gaussiank_calibrated nothing of its error") {
  const std::size_t d = 20000;
  const auto selector = make_selector("gaussiank_calibrated");
  const auto step = [&](std::uint32_t t, double density) {
    std::vector<float> u(d);
    const CounterRng rng(53, RngUse::test, t);
    for (std::size_t i = 0; i < d; ++i) u[i] = rng.normal(i);
    select_once(*selector, u, {}, {density});
    selector->commit({});
  };
  for (std::uint32_t t = 0; t < 5; ++t) step(t, 0.01);
  const auto before = carried(*selector);
  REQUIRE(before.bias != 0);
  step(5, 0.02);
  const auto after = carried(*selector);
  CHECK((after.bias == before.bias && after.variance == before.variance));
  step(6, 0.02);
  CHECK(carried(*selector).bias != before.bias);
}
