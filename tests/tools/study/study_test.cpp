// The studies but selection. Golden values: computed in float64, ties by lower index.
#include "tools/study/study.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "nn/base/check.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "tools/study/study_regression.h"
#include "tools/study/study_toy.h"

using namespace topknot;

namespace {

CompressOptions method(const std::string& name, double mu = 4, const std::string& variant = "A") {
  CompressOptions options;
  options.name = name;
  options.set("mu", mu);
  options.set("variant", variant);
  return options;
}

// Of `study accuracy`.
void draw(const TempFolder& temp, const std::string& text) {
  std::ofstream(temp.at("summary.csv")) << text;
  const Study& study = studies().find("accuracy");
  study.run(
      StudyArguments("accuracy", study.keys, {"in=" + temp.at("summary.csv"), "out=" + temp.at("out")}));
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

TEST_CASE("a study's keys: defaults, lists, and clear refusals") {
  const std::vector<StudyKey> keys = {{"iterations", "2500", ""}, {"s", "0.1,0.6", ""}, {"out", "x", ""}};
  const StudyArguments arguments("regression", keys, {"iterations=10"});
  CHECK(arguments.integer("iterations", 1, 100) == 10);
  CHECK(arguments.numbers("s", 0, 1) == std::vector<double>{0.1, 0.6});
  const auto made = [&](const std::vector<std::string>& given) {
    return StudyArguments("regression", keys, given);
  };
  CHECK_THROWS_WITH(made({"iteration=1"}), Catch::Contains("did you mean 'iterations'"));
  CHECK_THROWS_WITH(made({"iterations"}), Catch::Contains("not key=value"));
  CHECK_THROWS_WITH(made({"s=1", "s=2"}), Catch::Contains("twice"));
  CHECK_THROWS_WITH(made({"iterations=1e3"}).integer("iterations", 1, 10000),
                    Catch::Contains("iterations of study regression needs a whole number from 1 to 10000"));
  for (const std::string bad : {"s=", "s=0.1,,0.2", "s=2", "s=nan", "s=0.5x"})
    CHECK_THROWS_AS(made({bad}).numbers("s", 0, 1), UserError);
  CHECK_THROWS_WITH(studies().find("regresion"), Catch::Contains("did you mean 'regression'"));
}

TEST_CASE("study accuracy draws a line a method, and dense as the reference") {
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

TEST_CASE("study accuracy refuses what is no summary") {
  CHECK(complaint("a,b\n").find("not a summary.csv") != std::string::npos);
  CHECK(complaint(kHeader).find("no row is named") != std::string::npos);
  CHECK(complaint(std::string(kHeader) + "topk-d0.1,1,x,,1,1,1,1,0\n").find("holds no number") !=
        std::string::npos);
  CHECK(complaint(std::string(kHeader) + "topk-dx,1,3,,1,1,1,1,0\n").find("holds no number") !=
        std::string::npos);
}
