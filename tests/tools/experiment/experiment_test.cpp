// The experiments but selection. Golden values: computed in float64, ties by lower index.
#include "tools/experiment/experiment.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "compress/select/selector.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"
#include "tests/support/catch.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"
#include "tools/experiment/regtopk.h"
#include "tools/experiment/selection.h"
#include "train/metrics/npy.h"

namespace topknot {
namespace {

CompressOptions method(const std::string& name, double mu = 4, const std::string& variant = "A") {
  CompressOptions options;
  options.name = name;
  options.set("mu", mu);
  options.set("variant", variant);
  return options;
}

// Of `experiment accuracy`.
void draw(const TempFolder& temp, const std::string& text) {
  std::ofstream(temp.at("summary.csv")) << text;
  const Experiment& experiment = experiments().find("accuracy");
  experiment.run(ExperimentArguments("accuracy", experiment.keys,
                                     {"in=" + temp.at("summary.csv"), "out=" + temp.at("out")}));
}

std::string complaint(const std::string& text) {
  const TempFolder temp;
  try {
    draw(temp, text);
  } catch (const UserError& error) {
    return error.what();
  }
  return "accepted";
}

constexpr const char* kHeader =
    "run,seeds,accuracy,spread,ratio_up,sent_per_step,received_per_step,seconds,skipped_steps\n";

constexpr std::size_t kSteps = 12, kNumel = 3000;

void normal_gradient(std::size_t t, std::span<float> out) {
  const CounterRng rng(5, RngUse::test, static_cast<std::uint32_t>(t));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = rng.normal(i);
}

void run(const std::vector<std::string>& given) {
  const Experiment& experiment = experiments().find("selection");
  experiment.run(ExperimentArguments("selection", experiment.keys, given));
}

// Topk and residual by the definition, in the experiment's own arithmetic.
double naive_energy(double density, std::size_t skip) {
  const auto k = static_cast<std::size_t>(density * kNumel);
  std::vector<float> gradient(kNumel), residual(kNumel);
  double sum = 0;
  for (std::size_t t = 0; t < kSteps; ++t) {
    normal_gradient(t, gradient);
    for (std::size_t i = 0; i < kNumel; ++i) residual[i] += gradient[i];
    std::vector<std::size_t> order(kNumel);
    for (std::size_t i = 0; i < kNumel; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::abs(residual[a]) > std::abs(residual[b]);
    });
    double all = 0, taken = 0;
    for (std::size_t i = 0; i < kNumel; ++i) {
      const double square = static_cast<double>(residual[order[i]]) * residual[order[i]];
      all += square;
      if (i < k) taken += square, residual[order[i]] = 0;
    }
    if (t >= skip) sum += taken / all;
  }
  return sum / static_cast<double>(kSteps - skip);
}

}  // namespace

TEST_CASE("the toy problem: Top-k stands still for 99 steps, RegTop-k follows dense") {
  const ToyTrace dense = toy_trace(method("dense"), 150);
  CHECK(dense.loss[0] == Approx(0.313261688).epsilon(3e-9));
  CHECK(dense.loss[150] == Approx(0.00735508407946996).epsilon(1e-7));
  CHECK(dense.weights[150][0] == 0);
  CHECK(dense.weights[150][1] == Approx(4.908683697).epsilon(1e-7));

  const ToyTrace topk = toy_trace(method("topk"), 150);
  // Step 99 is a tie in exact arithmetic: the residual's sum of 100 equal parts, rounded, against the whole.
  for (std::size_t t = 0; t <= 99; ++t) REQUIRE(topk.loss[t] == Approx(0.313261687518).epsilon(1e-11));
  CHECK(topk.loss[101] == Approx(1e-11).epsilon(0.3));
  CHECK(topk.weights[101][0] == 0);
  CHECK(topk.weights[101][1] == Approx(25.2).epsilon(0.02));
  for (std::size_t t = 0; t < 99; ++t) REQUIRE(topk.sent[t] == std::array{0u, 0u});
  CHECK(topk.sent[99] == std::array{1u, 1u});

  for (const double mu : {1.0, 2.0, 4.0}) {
    const ToyTrace trace = toy_trace(method("regtopk", mu), 150);
    const std::vector<std::pair<std::size_t, double>> golden = {{1, 0.313261688},   {2, 0.204333766},
                                                                {4, 0.150618317},   {10, 0.0836587674},
                                                                {50, 0.0209239622}, {150, 0.00726312926}};
    for (const auto& [t, loss] : golden) CHECK(trace.loss[t] == Approx(loss).epsilon(1e-7));
    CHECK(trace.weights[150][0] == 0);
    CHECK(trace.weights[150][1] == Approx(4.921310752529).epsilon(1e-7));
    for (std::uint32_t t = 0; t < 150; ++t) REQUIRE(trace.sent[t] == std::array{t % 2, t % 2});
  }
}

TEST_CASE("linear regression with S = 0.6: RegTop-k A converges where Top-k stands still") {
  std::vector<double> topk, regtopk;
  for (const std::uint64_t seed : {1, 2, 3, 4, 5}) {
    const RegressionProblem problem = make_regression(seed);
    topk.push_back(regression_distance(problem, method("topk"), 0.6, 1000));
    regtopk.push_back(regression_distance(problem, method("regtopk"), 0.6, 1000));
  }
  for (auto* values : {&topk, &regtopk}) std::sort(values->begin(), values->end());
  CAPTURE(topk, regtopk);
  CHECK(topk[2] > -3.5);
  CHECK(regtopk[2] < -7);
}

TEST_CASE("the regression's optimum is where the ranks' gradients cancel") {
  const RegressionProblem problem = make_regression(11);
  REQUIRE(problem.matrix.size() == 20);
  double largest_sum = 0, largest = 0;
  for (std::size_t j = 0; j < problem.dims; ++j) {
    double sum = 0;
    for (std::size_t r = 0; r < problem.matrix.size(); ++r) {
      double gradient = -problem.rhs[r][j];
      for (std::size_t k = 0; k < problem.dims; ++k)
        gradient += problem.matrix[r][j * problem.dims + k] * problem.optimum[k];
      largest = std::max(largest, std::abs(gradient));
      sum += gradient;
    }
    largest_sum = std::max(largest_sum, std::abs(sum));
  }
  CHECK(largest > 1);  // the workers disagree
  CHECK(largest_sum < 1e-10);
}

TEST_CASE("a experiment's keys: defaults, lists, and clear refusals") {
  const std::vector<ExperimentKey> keys = {
      {"iterations", "2500", ""}, {"s", "0.1,0.6", ""}, {"out", "x", ""}};
  const ExperimentArguments arguments("regression", keys, {"iterations=10"});
  CHECK(arguments.integer("iterations", 1, 100) == 10);
  CHECK(arguments.numbers("s", 0, 1) == std::vector<double>{0.1, 0.6});
  const auto made = [&](const std::vector<std::string>& given) {
    return ExperimentArguments("regression", keys, given);
  };
  CHECK_THROWS_WITH(made({"iteration=1"}), Catch::Contains("did you mean 'iterations'"));
  CHECK_THROWS_WITH(made({"iterations"}), Catch::Contains("not key=value"));
  CHECK_THROWS_WITH(made({"s=1", "s=2"}), Catch::Contains("twice"));
  CHECK_THROWS_WITH(
      made({"iterations=1e3"}).integer("iterations", 1, 10000),
      Catch::Contains("iterations of experiment regression needs a whole number from 1 to 10000"));
  for (const std::string bad : {"s=", "s=0.1,,0.2", "s=2", "s=nan", "s=0.5x"})
    CHECK_THROWS_AS(made({bad}).numbers("s", 0, 1), UserError);
  CHECK_THROWS_WITH(experiments().find("regresion"), Catch::Contains("did you mean 'regression'"));
}

TEST_CASE("experiment accuracy draws a line a method, and dense as the reference") {
  const TempFolder temp;
  draw(temp, std::string(kHeader) +
                 "dense,3,66.71,0.60,1.00,1,1,1,0\ntopk-d0.001,1,42.65,,724,1,1,1,0\ntopk-d0.01,1,62.49,,79,"
                 "1,1,1,0\n"
                 "randk-d0.01,1,10.08,,80,1,1,1,0\ndgc_full,1,60,,100,1,1,1,0\n");
  std::stringstream svg;
  svg << std::ifstream(temp.at("out/accuracy.svg")).rdbuf();
  for (const char* text : {"topk", "randk", "dense", "test accuracy, %"})
    CHECK(svg.str().find(text) != std::string::npos);
  CHECK(svg.str().find("dgc_full") == std::string::npos);
}

TEST_CASE("experiment accuracy refuses what is no summary") {
  CHECK(complaint("a,b\n").find("not a summary.csv") != std::string::npos);
  CHECK(complaint(kHeader).find("no row is named") != std::string::npos);
  CHECK(complaint(std::string(kHeader) + "topk-d0.1,1,x,,1,1,1,1,0\n").find("holds no number") !=
        std::string::npos);
  CHECK(complaint(std::string(kHeader) + "topk-dx,1,3,,1,1,1,1,0\n").find("holds no number") !=
        std::string::npos);
}

TEST_CASE("selection experiment: every registered selector is measured, topk first and threshold last") {
  const auto methods = selection_methods();
  std::vector<std::string> names;
  for (const auto& method : methods)
    if (names.empty() || names.back() != method.options.select) names.push_back(method.options.select);
  CHECK(names.front() == "topk");
  CHECK(names.back() == "threshold");
  auto registered = selectors().names();
  std::sort(names.begin(), names.end());
  std::sort(registered.begin(), registered.end());
  CHECK(names == registered);
}

TEST_CASE("selection experiment: topk has exactly k and its own energy, others are held against it") {
  const auto methods = selection_methods();
  const std::vector<double> densities = {0.1, 0.01};
  const auto rows = selection_quality(methods, densities, kSteps, kNumel, 4, normal_gradient);
  REQUIRE(rows.size() == methods.size() * densities.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const SelectionQuality& row = rows[i];
    CAPTURE(row.label, row.density, row.count_mean, row.energy_to_topk);
    CHECK(row.label == methods[i % methods.size()].label);
    CHECK(row.density == densities[i / methods.size()]);
    CHECK(row.k == (row.density == 0.1 ? 300 : 30));
    CHECK(row.steps == kSteps - 4);
    CHECK(row.count_least <= row.count_mean);
    CHECK(row.count_mean <= row.count_greatest);
    if (row.label == "topk") {
      CHECK(row.count_least == 1);
      CHECK(row.count_mean == 1);
      CHECK(row.count_greatest == 1);
      CHECK(row.within == 1);
      CHECK(row.energy_to_topk == 1);
      CHECK(row.energy == Approx(naive_energy(row.density, 4)).epsilon(1e-12));
    }
    if (row.label == "randk") {
      CHECK(row.count_mean == 1);
      CHECK(row.energy_to_topk < 0.6);  // the k largest of a normal vector hold far more than any k
      CHECK(row.energy == Approx(row.density).epsilon(0.6));
    }
    if (row.label ==
        "threshold") {  // topk's median k-th magnitude: too many in some steps, too few in others
      CHECK(row.count_least < 1);
      CHECK(row.count_greatest > 1);
    }
    // No k entries hold more than the k largest.
    if (row.count_greatest <= 1) CHECK(row.energy_to_topk <= 1);
  }
}

TEST_CASE("selection experiment: a vector of zeros has nothing to capture") {
  auto methods = selection_methods();
  std::erase_if(methods, [](const SelectionMethod& method) { return method.label != "topk"; });
  const auto rows = selection_quality(
      methods, {0.01}, 3, 500, 0, [](std::size_t, std::span<float> out) { std::ranges::fill(out, 0.0f); });
  CHECK(rows.at(0).count_mean == 1);
  CHECK(std::isnan(rows.at(0).energy));
}

TEST_CASE("selection experiment: cost is measured for every method, with topk's k") {
  const auto methods = selection_methods();
  const auto rows = selection_cost(methods, 5000, 0.01, 3, 2);
  REQUIRE(rows.size() == methods.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(rows[i].label);
    CHECK(rows[i].label == methods[i].label);
    CHECK(rows[i].size == 5000);
    CHECK(rows[i].rounds == 3);
    CHECK(rows[i].step_ms > 0);
    CHECK(rows[i].ratio > 0);
    CHECK(rows[i].ratio_least <= rows[i].ratio);
    CHECK(rows[i].ratio <= rows[i].ratio_greatest);
    if (rows[i].label == "topk") {
      CHECK(rows[i].k == 50);
      CHECK(rows[i].count == 1);
    }
  }
}

TEST_CASE("selection experiment: tables and plots of both parts are written") {
  const TempFolder temp;
  std::vector<float> values(kSteps * kNumel);
  for (std::size_t t = 0; t < kSteps; ++t) normal_gradient(t, std::span(values).subspan(t * kNumel, kNumel));
  write_npy(temp.at("g.npy"), {kSteps, kNumel}, std::span<const float>(values));
  run({"in=" + temp.at("g.npy"), "densities=0.1", "skip=2", "max_log2=16", "rounds=1",
       "out=" + temp.at("out")});
  const auto methods = selection_methods();
  const auto quality = json_lines_of(temp.at("out/selection_quality.jsonl"));
  const auto cost = json_lines_of(temp.at("out/selection_cost.jsonl"));
  REQUIRE(quality.size() == methods.size());
  REQUIRE(cost.size() == methods.size());
  for (std::size_t i = 0; i < methods.size(); ++i) {
    CHECK(quality[i].at("selector") == methods[i].label);
    CHECK(cost[i].at("selector") == methods[i].label);
    CHECK(cost[i].at("size") == 65536);
  }
  CHECK(quality[0].at("energy_to_topk") == 1.0);
  for (const std::string name : {"count.svg", "energy.svg", "cost.svg", "quality.csv", "cost.csv"}) {
    CAPTURE(name);
    const std::string text = text_of(temp.at("out/selection_" + name));
    for (const auto& method : methods) CHECK_THAT(text, Catch::Contains(method.label));
  }
}

TEST_CASE("selection experiment: wrong input gets one clear message") {
  const TempFolder temp;
  const std::string out = "out=" + temp.at("out");
  CHECK_THROWS_WITH(run({"in=" + temp.at("none.npy"), out}), Catch::Contains("none.npy"));
  CHECK_THROWS_AS(run({"in=" + temp.at("none.npy"), out}), UserError);

  std::vector<float> values(24, 1.0f);
  write_npy(temp.at("flat.npy"), {24}, std::span<const float>(values));
  CHECK_THROWS_WITH(run({"in=" + temp.at("flat.npy"), out}),
                    Catch::Contains("has shape [24]") && Catch::Contains("[steps, elements]"));
  write_npy(temp.at("ranks.npy"), {2, 3, 4}, std::span<const float>(values));
  CHECK_THROWS_WITH(run({"in=" + temp.at("ranks.npy"), out}), Catch::Contains("[2, 3, 4]"));
  write_npy(temp.at("short.npy"), {4, 6}, std::span<const float>(values));
  CHECK_THROWS_WITH(run({"in=" + temp.at("short.npy"), "skip=4", out}),
                    Catch::Contains("skip is 4") && Catch::Contains("has 4 steps"));
  values[13] = std::numeric_limits<float>::quiet_NaN();
  write_npy(temp.at("nan.npy"), {4, 6}, std::span<const float>(values));
  CHECK_THROWS_WITH(run({"in=" + temp.at("nan.npy"), "skip=0", out}), Catch::Contains("step 2 has a NaN"));

  CHECK_THROWS_WITH(run({"max_log=16", out}), Catch::Contains("did you mean 'max_log2'"));
  CHECK_THROWS_WITH(run({"max_log2=12", out}), Catch::Contains("needs 0, or 16 to 30"));
  CHECK_THROWS_WITH(run({"max_log2=0", out}), Catch::Contains("nothing to do"));
  CHECK_THROWS_WITH(run({"in=" + temp.at("short.npy"), "densities=2", out}),
                    Catch::Contains("densities of experiment selection"));
  CHECK_THROWS_WITH(run({"max_log2=16", "density=0", out}),
                    Catch::Contains("density of experiment selection"));
  // Of the part that does not run too.
  for (const std::string key : {"densities", "skip"})
    CHECK_THROWS_WITH(run({"max_log2=16", "rounds=1", key + "=abc", out}),
                      Catch::Contains(key + " of experiment selection"));
  for (const std::string key : {"density", "rounds", "threads"})
    CHECK_THROWS_WITH(run({"in=" + temp.at("short.npy"), "skip=0", "max_log2=0", key + "=abc", out}),
                      Catch::Contains(key + " of experiment selection"));
}

}  // namespace topknot
