#include "compress/select/passes/quantiles.h"
#include "tests/compress/select/select_once.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// What is carried from step to step, as it is saved.
struct Learned {
  std::int32_t stages = 1;
  std::int32_t steps = 0;  // committed since the stages were looked at
  double sum = 0;          // of count / (r d) over those
  bool operator==(const Learned&) const = default;
};
constexpr auto learned = carried_as<Learned>;

CompressOptions sidco_options(const std::string& distribution, int stages) {
  return named("sidco", {"distribution=" + distribution, "stages=" + std::to_string(stages)});
}

// Q(a, x) by integrating the density over ln t, which is smooth, with Simpson's rule.
double integrated_tail(double a, double x) {
  const int n = 4000;
  const double low = std::log(x), high = std::log(a + 700.0), h = (high - low) / n;
  double sum = 0;
  for (int i = 0; i <= n; ++i) {
    const double y = low + i * h, f = std::exp(a * y - std::exp(y) - std::lgamma(a));
    sum += f * (i == 0 || i == n ? 1 : i % 2 ? 4 : 2);
  }
  return sum * h / 3;
}

// The method as the paper's code has it, over a list of normalised magnitudes that shrinks. 0 for the gamma
// distribution's first stage, which is checked by the integral.
std::vector<SelectDiagnostics::Evaluation> plain_sidco(const std::vector<float>& x,
                                                       const std::string& distribution, double ratio,
                                                       int stages, double& norm) {
  std::vector<double> a;
  double squares = 0;
  for (const float v : x) squares += double(v) * double(v);
  norm = std::sqrt(squares);
  for (const float v : x) a.push_back(std::abs(double(v)) / norm);
  std::vector<SelectDiagnostics::Evaluation> trace;
  const bool single = stages == 1 || ratio >= 0.25;
  const double later = single ? 1 : std::pow(ratio / 0.25, 1.0 / (stages - 1));
  for (int stage = 0; stage < (single ? 1 : stages); ++stage) {
    const double first = stage == 0 ? 0 : *std::min_element(a.begin(), a.end());
    const double r = stage > 0 ? later : single ? ratio : 0.25;
    double mean = 0, variance = 0;
    for (const double v : a) mean += (v - first) / double(a.size());
    for (const double v : a) variance += (v - first - mean) * (v - first - mean) / double(a.size() - 1);
    const double alpha = 0.5 * mean * (mean * mean / variance + 1), c = 0.5 * (mean * mean / variance - 1);
    double t =
        distribution == "exponential" ? -mean * std::log(r) : alpha * (1 - std::exp(c * std::log(r))) / c;
    if (distribution == "gamma" && stage == 0) {
      double logs = 0;
      for (const double v : a) logs += std::log(v + 0x1p-52) / double(a.size());
      const double s = std::log(mean) - logs,
                   shape = (3 - s + std::sqrt((s - 3) * (s - 3) + 24 * s)) / (12 * s);
      double low = 0, high = 800;
      for (int i = 0; i < 50; ++i)
        (integrated_tail(shape, (low + high) / 2) > r ? low : high) = (low + high) / 2;
      t = mean / shape * low;
    }
    t += first;
    std::vector<double> tail;
    for (const double v : a)
      if (v > t) tail.push_back(v);
    a = tail;
    trace.push_back({t * norm, a.size()});
  }
  return trace;
}

}  // namespace

TEST_CASE("sidco's exponential fit gives the golden thresholds") {
  const std::vector<float> x = fixture("cubic");
  for (const auto& [stages, threshold] : {std::pair{1, 1.151292592}, std::pair{2, 1.276566938}}) {
    const auto selector = make_selector("sidco", sidco_options("exponential", stages));
    const auto selected = select_from_copy(*selector, x, {0.01});
    CHECK(selected.threshold == Approx(threshold).epsilon(1e-6));
    CHECK(selected.indices.empty());
    CHECK(selected.finite);
    CHECK(selector->diagnostics().trace.size() == std::size_t(stages));
  }
}

TEST_CASE("sidco's fits and stages are those of the definition") {
  const std::string distribution = GENERATE("exponential", "pareto", "gamma");
  for (const double power : {0.7, 1.5, 3.0})
    for (const int stages : {1, 2, 4})
      for (const double density : {0.3, 0.01, 0.001}) {
        if (distribution == "gamma" && (stages == 4 || density == 0.3)) continue;  // the integral takes time
        INFO(distribution << " " << power << " " << stages << " " << density);
        const std::vector<float> x = noise(40007, 1, power);
        double norm = 0;
        const auto expected = plain_sidco(x, distribution, density, stages, norm);
        const auto selector = make_selector("sidco", sidco_options(distribution, stages));
        const auto selected = select_from_copy(*selector, x, {density});
        const auto trace = selector->diagnostics().trace;
        REQUIRE(trace.size() == expected.size());
        for (std::size_t i = 0; i < expected.size(); ++i) {
          CHECK(trace[i].threshold == Approx(expected[i].threshold).epsilon(1e-8));
          CHECK(trace[i].count == expected[i].count);
        }
        CHECK(selected.indices == positions_above(x, selected.threshold));
        CHECK(well_formed(selected, x));
      }
}

TEST_CASE("sidco finds about k where the fit is right") {
  // Exponential magnitudes; and their squares and cubes, which more stages fit.
  const CounterRng rng(31, RngUse::test);
  std::vector<float> x(200000);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = -std::log(1.0f - rng.uniform(i)) * (i % 2 ? 1.0f : -1.0f);
  for (const std::string distribution : {"exponential", "pareto", "gamma"})
    for (const int stages : {1, 3}) {
      const auto selector = make_selector("sidco", sidco_options(distribution, stages));
      const double count = double(select_from_copy(*selector, x, {0.001}).indices.size());
      CHECK(count == Approx(200).epsilon(0.25));
    }
}

TEST_CASE("sidco changes its stages every five committed steps, by the mean count over the target") {
  // Too heavy a tail selects too many, which takes a stage away; too light a one adds stages, up to
  // ceil(log2(1 / density)); nothing selected counts as 0.
  const auto selector = make_selector("sidco", sidco_options("exponential", 0));
  const std::vector<float> light = noise(20000, 1, 0.1), heavy = noise(20000, 2, 3);
  CHECK(learned(*selector).stages == 1);
  int expected = 1;
  for (int t = 0; t < 55; ++t) {
    const std::vector<float>& x = t < 45 ? light : heavy;
    select_from_copy(*selector, x, {0.01});
    selector->commit({});
    if (t % 5 == 4) expected = t < 45 ? std::min(7, expected + 1) : expected;
    if (t < 45) CHECK(learned(*selector).stages == expected);
  }
  CHECK(expected == 7);

  const auto other = make_selector("sidco", sidco_options("exponential", 0));
  double sum = 0;
  std::int32_t stages = 1;
  for (int t = 0; t < 60; ++t) {
    const auto x = noise(20000, std::uint32_t(t), t < 30 ? 0.3 : 4);
    const auto selected = select_from_copy(*other, x, {0.01});
    other->commit({});
    sum += double(selected.indices.size()) / 200;
    if (t % 5 == 4) {
      stages = std::clamp(stages + (sum / 5 < 0.8) - (sum / 5 > 1.2), 1, 7);
      sum = 0;
    }
    REQUIRE(learned(*other).stages == stages);
  }
}

TEST_CASE("a fixed number of stages does not change") {
  const auto selector = make_selector("sidco", sidco_options("pareto", 3));
  for (std::uint32_t t = 0; t < 12; ++t) {
    select_from_copy(*selector, noise(20000, t, 0.2), {0.01});
    CHECK(selector->diagnostics().trace.size() <= 3);
    selector->commit({});
  }
  CHECK(learned(*selector) == Learned{});
}

TEST_CASE("sidco validates its state and its options") {
  const auto selector = make_selector("sidco");
  for (const Learned& state : {Learned{0}, {5000}, {1, 5}, {1, -1}, {1, 1, std::nan("")}}) {
    StateWriter writer;
    writer.put(state);
    CHECK_THROWS_AS(restore(*selector, writer.take()), Error);
  }
  CHECK_THROWS_WITH(make_selector("sidco", sidco_options("laplace", 0)),
                    Catch::Contains("compress.distribution"));
  CHECK_THROWS_WITH(make_selector("sidco", sidco_options("gamma", -1)), Catch::Contains("compress.stages"));
}

TEST_CASE("sidco's stages end where a tail is empty or of one magnitude, and the threshold holds") {
  const std::string distribution = GENERATE("exponential", "pareto");
  // Two magnitudes: the tail above the first threshold is of one.
  std::vector<float> two(10000, 0.01f);
  for (std::size_t i = 0; i < 100; ++i) two[97 * i] = -5.0f;
  const auto selector = make_selector("sidco", sidco_options(distribution, 5));
  const auto selected = select_from_copy(*selector, two, {0.001});
  CHECK(selected.indices.size() == 100);
  CHECK(selector->diagnostics().trace.size() == 1);
  // Nearly one magnitude: nothing above the first, but where the fit sees how small the variance is.
  std::vector<float> flat(10000, 1.0f);
  flat[3] = 1.25f;
  CHECK(select_from_copy(*selector, flat, {0.001}).indices.size() == (distribution == "pareto" ? 1 : 0));
}

TEST_CASE("sidco selects exactly what no fit can say anything about, and nothing of zeros") {
  const std::string distribution = GENERATE("exponential", "pareto", "gamma");
  const auto selector = make_selector("sidco", sidco_options(distribution, 0));
  CHECK(select_from_copy(*selector, std::vector<float>(5000), {}).indices.empty());
  const std::vector<float> constant(5000, -0.3f), few = noise(900, 1);
  CHECK(select_from_copy(*selector, constant, {}).indices == plain_topk(constant, 50));
  selector->commit({});
  CHECK(select_from_copy(*selector, few, {0.001}).indices == plain_topk(few, 1));
  selector->commit({});
  CHECK(learned(*selector) == Learned{});
  const std::vector<float> one = {-2};
  CHECK(select_from_copy(*selector, one, {0.001}).values == one);
}

TEST_CASE("sidco fits once where the density is that of its first stage") {
  const auto selector = make_selector("sidco", sidco_options("exponential", 3));
  select_from_copy(*selector, noise(5000, 1), {0.25});
  CHECK(selector->diagnostics().trace.size() == 1);
  select_from_copy(*selector, noise(5000, 1), {0.249});
  CHECK(selector->diagnostics().trace.size() == 3);
}

TEST_CASE("the gamma tail is exponential for shape 1, a Poisson sum for whole ones, normal for a half") {
  for (const double x : {1e-8, 0.1, 0.9, 1.0, 2.5, 7.0, 40.0, 300.0}) {
    CHECK(gamma_tail(1.0, x) == Approx(std::exp(-x)).epsilon(1e-13));
    CHECK(gamma_tail(0.5, x) == Approx(std::erfc(std::sqrt(x))).epsilon(1e-12));
    for (const int n : {2, 5, 30}) {
      double term = std::exp(-x), sum = 0;
      for (int i = 0; i < n; term *= x / ++i) sum += term;
      CHECK(gamma_tail(n, x) == Approx(sum).epsilon(1e-12));
    }
  }
  CHECK(gamma_tail(3.0, 0.0) == 1.0);
}

TEST_CASE("the gamma quantile: tables of the chi-square distribution, and closed forms") {
  // Half the chi-square quantile with 2 * shape degrees of freedom.
  struct Row {
    double freedom, tail, value;
  };
  for (const auto& [freedom, tail, value] :
       {Row{1, 0.05, 3.841458820694124}, Row{2, 0.05, 5.991464547107979}, Row{5, 0.01, 15.08627246938899},
        Row{10, 0.05, 18.307038053275146}, Row{10, 0.95, 3.940299136119060},
        Row{100, 0.025, 129.5611971858366}, Row{1, 0.95, 0.003932140000019522}})
    CHECK(2 * gamma_tail_quantile(freedom / 2, tail) == Approx(value).epsilon(1e-11));
  for (const double q : {0.99, 0.5, 0.25, 0.01, 0.001, 1e-6, 1e-12}) {
    CHECK(gamma_tail_quantile(1.0, q) == Approx(-std::log(q)).epsilon(1e-13));
    const double z = normal_quantile(q / 2);
    CHECK(gamma_tail_quantile(0.5, q) == Approx(0.5 * z * z).epsilon(1e-11));
  }
}

TEST_CASE("the gamma quantile inverts the tail over all shapes that a fit can give") {
  for (const double shape : {0.02, 0.026, 0.1, 0.7, 1.3, 9.0, 250.0, 1e4, 9e5})
    for (const double q : {0.9, 0.25, 0.05, 0.001, 1e-5}) {
      INFO(shape << " " << q);
      const double x = gamma_tail_quantile(shape, q);
      // Below the least double the answer is 0, whose tail is 1.
      if (x == 0)
        CHECK(std::log(1 - q) + std::lgamma(shape + 1) < shape * std::log(1e-300));
      else
        CHECK(gamma_tail(shape, x) == Approx(q).epsilon(shape < 1000 ? 1e-11 : 1e-8));
    }
  // A huge shape is continuous with that below it.
  for (const double q : {0.25, 0.001})
    CHECK(gamma_tail_quantile(1.0000001e6, q) / gamma_tail_quantile(0.9999999e6, q) ==
          Approx(1.0000002).epsilon(1e-9));
  CHECK(gamma_tail_quantile(1e12, 0.001) == Approx(1e12).epsilon(1e-5));
}

TEST_CASE("what is outside the gamma distribution is refused") {
  CHECK_THROWS_AS(gamma_tail_quantile(0, 0.5), Error);
  CHECK_THROWS_AS(gamma_tail_quantile(1, 0), Error);
  CHECK_THROWS_AS(gamma_tail_quantile(1, 1), Error);
  CHECK_THROWS_AS(gamma_tail(1, -1), Error);
}
