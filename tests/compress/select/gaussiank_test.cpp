#include "compress/select/passes/passes.h"
#include "compress/select/passes/quantiles.h"
#include "tests/compress/select/select_once.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Golden {
  double threshold;
  std::size_t count;
  std::uint64_t sum;
};

void check_trace(const std::string& name, double density, const std::vector<Golden>& golden) {
  INFO(name << " at " << density);
  std::vector<float> x = fixture(name);
  const auto selector = make_selector("gaussiank");
  const Selection selected = select_once(*selector, x, {}, {density});
  const auto trace = selector->diagnostics().trace;
  REQUIRE(trace.size() == golden.size());
  for (std::size_t i = 0; i < golden.size(); ++i) {
    const auto& [threshold, count] = trace[i];
    CHECK(threshold == Approx(golden[i].threshold).epsilon(1e-6));
    CHECK(std::abs(double(count) - double(golden[i].count)) <= 2);
    const std::vector<std::uint32_t> above = positions_above(x, threshold);
    CHECK(above.size() == count);
    if (count == golden[i].count) CHECK(index_sum(above) == golden[i].sum);
    if (i + 1 == golden.size()) {
      CHECK(selected.indices == above);
      CHECK(selected.threshold == threshold);
    }
  }
  CHECK(well_formed(selected, x));
}

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
      if (model == "layers") g[i] *= std::pow(10.0f, -2.0f * float(i * 20 / d) / 19.0f);
    }
  }
  return g;
}

// Error feedback over steps; u is left in `residual` without what was selected.
Selection feedback_step(Selector& selector, std::vector<float>& residual, std::vector<float> g,
                        double density) {
  Selection selected = select_once(selector, g, residual, {density});
  keep_rest(selector, selected, g, residual);
  return selected;
}

// What is saved: the threshold of the last committed step and what its counts taught.
struct Carried {
  double threshold, count, power, bias, variance;
};
constexpr auto carried = carried_as<Carried>;

// Every entry above the threshold, no other, with its value.
void check_is_threshold_selection(const Selection& selected, const std::vector<float>& u) {
  CHECK(selected.indices == positions_above(u, selected.threshold));
  CHECK(well_formed(selected, u));
}

}  // namespace

TEST_CASE("gaussiank gives the golden traces") {
  check_trace("cubic", 0.01, {{0.973520717, 89, 440308}});
  check_trace("cubic", 0.001,
              {{1.243664462, 0, 0}, {0.621832231, 1465, 7325124}, {0.932748346, 229, 1140798}});
  check_trace("p9", 0.01, {{0.590865649, 569, 2841988}, {0.886298473, 133, 660462}});
}

TEST_CASE("gaussiank's third threshold is 2.25 or 0.25 times the first where the second errs on its side") {
  std::vector<float> many(2500);
  for (std::size_t i = 0; i < 100; ++i) many[i] = (i < 20 ? 13.0f : 10.0f) * (i % 2 ? 1 : -1);
  const auto selector = make_selector("gaussiank");
  Selection selected = select_once(*selector, many, {}, {0.01});
  auto trace = selector->diagnostics().trace;
  REQUIRE(trace.size() == 3);
  const double t = trace[0].threshold;
  CHECK((trace[1].threshold == t * 1.5 && trace[2].threshold == t * 1.5 * 1.5));
  CHECK(selected.indices.size() == 20);

  std::vector<float> few(2500);
  for (std::size_t i = 0; i < few.size(); ++i) few[i] = i % 2 ? 1 : -1;
  selected = select_once(*selector, few, {}, {0.01});
  trace = selector->diagnostics().trace;
  REQUIRE(trace.size() == 3);
  CHECK(trace[2].threshold == trace[0].threshold * 0.25);
  CHECK(selected.indices.size() == few.size());
}

TEST_CASE("the moments behind gaussiank are those of the fixture") {
  std::vector<float> x = fixture("shift");
  const Moments moments = accumulate_with_moments(x, {});
  CHECK(moments.mean == Approx(0.49990007).epsilon(1e-8));
  CHECK(moments.deviation == Approx(0.377983373).epsilon(1e-8));
  CHECK((moments.finite && !moments.zero));
}

TEST_CASE("one outlier costs the moments no digits, wherever it lies") {
  const std::size_t n = 100001;
  for (const std::size_t at : {std::size_t{0}, n / 2, n - 1, std::size_t{77}}) {
    std::vector<float> x = noise(n, 8);
    x[at] = 1e6;
    long double sum = 0, squares = 0;
    for (const double value : x) sum += value;
    for (const double value : x) squares += (value - sum / n) * (value - sum / n);
    const Moments moments = accumulate_with_moments(x, {});
    INFO("at " << at);
    CHECK(moments.mean == Approx(double(sum / n)).epsilon(1e-14));
    CHECK(moments.deviation == Approx(std::sqrt(double(squares / (n - 1)))).epsilon(1e-14));
  }
}

TEST_CASE("the inverse normal distribution agrees with the table") {
  const std::vector<std::pair<double, double>> table = {
      {0.25, 1.1503493804},     {0.0625, 1.8627318674}, {0.05, 1.9599639845},
      {0.015625, 2.4175590162}, {0.01, 2.5758293035},   {0.004, 2.8781617391},
      {0.002, 3.0902323062},    {0.001, 3.2905267315},  {0.0001, 3.8905918864}};
  for (const auto& [density, z] : table)
    CHECK(-normal_quantile(density / 2) == Approx(z).margin(1e-9).epsilon(0));
  CHECK(normal_quantile(0.5) == Approx(0.0).margin(1e-15));
  CHECK(normal_quantile(0.975) == Approx(1.959963984540054).epsilon(1e-13));
  for (const double p : {1e-12, 1e-5, 0.02, 0.3, 0.49, 0.7})
    CHECK(0.5 * std::erfc(-normal_quantile(p) / std::sqrt(2.0)) == Approx(p).epsilon(1e-12));
  CHECK_THROWS_AS(normal_quantile(0.0), Error);
  CHECK_THROWS_AS(normal_quantile(1.0), Error);
}

TEST_CASE("gaussiank over a run: the carried bound changes the passes, never the selection") {
  const std::size_t d = 50000;
  const auto carried = make_selector("gaussiank");
  std::vector<float> residual(d);
  bool moved = false;
  int in_one_pass = 0;
  for (std::uint32_t t = 0; t < 60; ++t) {
    const CounterRng rng(17, RngUse::test, t);
    std::vector<float> u(d);
    for (std::size_t i = 0; i < d; ++i) u[i] = rng.normal(i) * (i < d / 2 ? 1.0f : 0.05f);
    std::vector<float> copy = u;
    const auto fresh = make_selector("gaussiank");
    const double density = t < 30 ? 0.01 : 0.001;
    const auto a = select_once(*carried, u, residual, {density}),
               b = select_once(*fresh, copy, residual, {density});
    REQUIRE(a.indices == b.indices);
    REQUIRE(same_bits(a.values, b.values));
    REQUIRE(same_bits(u, copy));
    moved |= carried->diagnostics().trace.size() > 1;
    in_one_pass += carried->diagnostics().passes == 1;
    CHECK(fresh->diagnostics().passes > 1);
    keep_rest(*carried, a, u, residual);
  }
  CHECK(moved);
  CHECK(in_one_pass > 40);
}

TEST_CASE("gaussiank needs one pass where the distribution stays, wherever its rule ends") {
  // Long tails end above the first threshold, after one that lets too many through; short ones below it.
  const double power = GENERATE(0.25, 0.5, 1.0, 2.0, 3.0);
  INFO("normal numbers to the power " << power);
  const auto carried = make_selector("gaussiank");
  std::vector<int> passes;
  for (std::uint32_t t = 0; t < 40; ++t) {
    std::vector<float> u = noise(50000, t, power);
    if (t >= 20)  // grows and shrinks
      for (float& x : u) x *= 1.0f + 0.4f * float(t % 4);
    std::vector<float> copy = u;
    const auto fresh = make_selector("gaussiank");
    REQUIRE(select_once(*carried, u, {}, {0.01}).indices == select_once(*fresh, copy, {}, {0.01}).indices);
    carried->commit({});
    if (t >= 10 && t < 20) passes.push_back(carried->diagnostics().passes);
  }
  CHECK(std::count(passes.begin(), passes.end(), 1) >= 8);
}

TEST_CASE("gaussiank of zeros selects nothing, of a constant exactly k, of few elements exactly k") {
  const auto selector = make_selector("gaussiank");
  std::vector<float> x(5000, 0.0f);
  CHECK(select_once(*selector, x, {}, {0.01}).indices.empty());
  std::fill(x.begin(), x.end(), 0.1f);
  const auto constant = select_once(*selector, x, {}, {0.01});
  CHECK(constant.indices == plain_topk(x, 50));
  CHECK(selector->diagnostics().trace.empty());
  std::vector<float> few = fixture("cubic");
  std::vector<float> enough = few;
  few.resize(2047);
  CHECK(select_once(*selector, few, {}, {0.01}).indices == plain_topk(few, 20));
  CHECK(selector->diagnostics().trace.empty());
  enough.resize(2048);
  select_once(*selector, enough, {}, {0.01});
  CHECK_FALSE(selector->diagnostics().trace.empty());
  std::vector<float> one(1, -3.0f);
  CHECK(select_once(*selector, one, {}, {0.001}).values == std::vector<float>{-3.0f});
}

TEST_CASE("two thirds and four thirds of k are near enough for gaussiank") {
  for (const std::size_t count : {20u, 40u}) {
    std::vector<float> x(3000);
    for (std::size_t i = 0; i < count; ++i) x[i] = i % 2 ? 10 : -10;
    const auto selector = make_selector("gaussiank");
    CHECK(select_once(*selector, x, {}, {0.01}).indices.size() == count);  // k is 30
    CHECK(selector->diagnostics().trace.size() == 1);
  }
}

TEST_CASE("gaussiank keeps to the rule where the mean is far from zero") {
  // t = mean + z std is negative for a mean far below zero: every magnitude exceeds it, and the rule sends
  // all.
  std::vector<float> x(4000);
  const CounterRng rng(19, RngUse::test);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = -5.0f + 0.1f * rng.normal(i);
  const auto selector = make_selector("gaussiank");
  CHECK(select_once(*selector, x, {}, {0.01}).indices.size() == x.size());
  CHECK(selector->diagnostics().trace.size() == 3);
}

TEST_CASE("gaussiank_calibrated stays within 8 % of k under error feedback, mostly in one pass") {
  const std::string model = GENERATE("normal", "layers", "laplace");
  const double density = GENERATE(0.01, 0.001);
  INFO(model << " at " << density);
  const std::size_t d = 20000;
  const auto k = double(target_count(density, d));
  const auto selector = make_selector("gaussiank_calibrated");
  std::vector<float> residual(d);
  int more_passes = 0;
  double candidates = 0;
  const std::uint32_t steps = 200, warm = 60;
  for (std::uint32_t t = 0; t < steps; ++t) {
    const auto n = double(feedback_step(*selector, residual, gradient(model, t, d), density).indices.size());
    REQUIRE(std::abs(n - k) <= 0.08 * k);
    if (t < warm) continue;
    more_passes += selector->diagnostics().passes > 1;
    candidates += double(selector->diagnostics().candidates) / k;
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
    keep_rest(*selector, selected, u, residual);
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
    const auto k = double(target_count(density, d));
    const auto n = double(feedback_step(*selector, residual, g, density).indices.size());
    INFO("step " << t);
    REQUIRE(std::abs(n - k) <= 0.08 * k);
  }
}

TEST_CASE("gaussiank_calibrated starts with the exact k") {
  std::vector<float> x = fixture("cubic");
  const auto selector = make_selector("gaussiank_calibrated");
  CHECK(select_once(*selector, x, {}, {0.01}).indices == plain_topk(x, 100));
}

TEST_CASE("gaussiank_calibrated validates its state") {
  const auto selector = make_selector("gaussiank_calibrated");
  const auto load = [&](const Carried& state) {
    StateWriter writer;
    writer.put(state);
    restore(*selector, writer.take());
  };
  CHECK_NOTHROW(load({0.5, 10, 2, 0, 0.1}));
  CHECK_NOTHROW(load({-1, 0, 1, 0, 0.04}));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Carried& state : {Carried{nan, 10, 2, 0, 0.1},
                               {-2, 10, 2, 0, 0.1},
                               {0.5, 0, 2, 0, 0.1},
                               {0.5, 10, 0, 0, 0.1},
                               {0.5, 10, 2, 0, nan},
                               {0.5, 10, 2, -9, 0.1}})
    CHECK_THROWS_AS(load(state), Error);
  CHECK(carried(*selector).threshold == -1);
  StateReader cut(std::span<const std::byte>{});
  CHECK_THROWS_AS(selector->load(cut), Error);
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
  const auto c = float(scale == 1  ? 0.1
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
