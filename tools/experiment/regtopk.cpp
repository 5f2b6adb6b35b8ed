// `experiment regression`: how far RegTop-k, Top-k and dense SGD end from the optimum, over the sparsity S.
// `experiment toy`: RegTop-k's toy problem, step by step.

#include "tools/experiment/regtopk.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/rng.h"
#include "nn/core/simd.h"
#include "tools/common/chart.h"
#include "tools/common/page.h"
#include "tools/experiment/experiment.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

// The ranks in one thread: the shipped compressors, whose blocks arrive at once.
class Ranks {
 public:
  // options.name: a sparse method with exact values, or dense: the plain average.
  Ranks(const CompressOptions& options, std::size_t numel, int ranks)
      : gradient_(static_cast<std::size_t>(ranks), std::vector<float>(numel)),
        residual_(gradient_),
        sent_(gradient_.size()) {
    if (options.name == "dense") {
      dense_.resize(numel);
      return;
    }
    const GroupSpec group{numel, {{0, numel}}, ranks};
    for (int r = 0; r < ranks; ++r) compressors_.push_back(make_compressor(options, group));
  }

  std::size_t size() const { return gradient_.size(); }
  // Where rank r's gradient goes before step().
  std::span<float> gradient(std::size_t r) { return gradient_[r]; }
  // One step; returns the average, until the next step. Throws Error if a gradient is not finite.
  std::span<const float> step(double density) {
    if (compressors_.empty()) return average_all();
    std::vector<std::vector<std::byte>> blocks;
    for (std::size_t r = 0; r < size(); ++r) {
      StepContext info;
      info.step = number_;
      info.density = density;
      info.rank = static_cast<int>(r);
      blocks.push_back(compressors_[r]->encode({gradient_[r], residual_[r]}, info).block);
      sent_[r] = *compressors_[r]->entries();
    }
    ++number_;
    for (std::size_t r = 0; r < size(); ++r) {
      Round round;
      round.blocks = blocks;
      compressors_[r]->decode(round);
      TOPKNOT_CHECK(compressors_[r]->finite(), "a gradient that is not finite");
      if (compressors_[r]->commit({}).data() == residual_[r].data()) std::swap(gradient_[r], residual_[r]);
    }
    return gradient_[0];
  }
  // Of the last step, by rank; without entries if the method is dense.
  const std::vector<SparseVector>& sent() const { return sent_; }

 private:
  std::span<const float> average_all() {
    std::fill(dense_.begin(), dense_.end(), 0.0f);
    for (const auto& gradient : gradient_)
      for (std::size_t j = 0; j < dense_.size(); ++j) dense_[j] += gradient[j];
    for (float& x : dense_) x *= 1.0f / static_cast<float>(size());
    return dense_;
  }

  std::vector<std::vector<float>> gradient_, residual_;
  std::vector<std::unique_ptr<Compressor>> compressors_;  // empty: dense
  std::vector<SparseVector> sent_;
  std::vector<float> dense_;
  std::int64_t number_ = 0;
};

constexpr double kLearningRate = 0.01;
constexpr double kCentreVariance = 5, kNoiseVariance = 0.5;

// out = matrix w - rhs for a symmetric n x n matrix: column by column, so that it vectorises over rows.
TOPKNOT_MULTIVERSION
void gradient_at(const float* matrix, const float* rhs, const float* w, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = -rhs[i];
  for (std::size_t j = 0; j < n; ++j)
    for (std::size_t i = 0; i < n; ++i) out[i] += matrix[j * n + i] * w[j];
}

// Solves a x = b for a symmetric positive definite a, n x n, by Cholesky's decomposition.
std::vector<double> solve(std::vector<double> a, std::vector<double> b) {
  const std::size_t n = b.size();
  for (std::size_t j = 0; j < n; ++j) {
    for (std::size_t k = 0; k < j; ++k)
      for (std::size_t i = j; i < n; ++i) a[i * n + j] -= a[i * n + k] * a[j * n + k];
    const double root = std::sqrt(a[j * n + j]);
    for (std::size_t i = j; i < n; ++i) a[i * n + j] /= root;
  }
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t k = 0; k < i; ++k) b[i] -= a[i * n + k] * b[k];
    b[i] /= a[i * n + i];
  }
  for (std::size_t i = n; i-- > 0;) {
    for (std::size_t k = i + 1; k < n; ++k) b[i] -= a[k * n + i] * b[k];
    b[i] /= a[i * n + i];
  }
  return b;
}

}  // namespace

RegressionProblem make_regression(std::uint64_t seed) {
  RegressionProblem problem;
  const std::size_t n = problem.dims;
  std::vector<double> matrix_sum(n * n), rhs_sum(n);
  for (int r = 0; r < problem.ranks; ++r) {
    const auto stream = static_cast<std::uint32_t>(r);
    const CounterRng entries(seed, RngUse::dataset, stream, 0), solution(seed, RngUse::dataset, stream, 1),
        noise(seed, RngUse::dataset, stream, 2);
    std::vector<double> t(n), row(n), matrix(n * n), rhs(n);
    const double centre = std::sqrt(kCentreVariance) * solution.normal(n);
    for (std::size_t j = 0; j < n; ++j) t[j] = centre + solution.normal(j);
    const double scale = 2.0 / static_cast<double>(problem.rows);
    for (std::size_t i = 0; i < problem.rows; ++i) {
      double y = std::sqrt(kNoiseVariance) * noise.normal(i);
      for (std::size_t j = 0; j < n; ++j) row[j] = entries.normal(i * n + j), y += row[j] * t[j];
      for (std::size_t j = 0; j < n; ++j) {
        rhs[j] += scale * row[j] * y;
        for (std::size_t k = 0; k < n; ++k) matrix[j * n + k] += scale * row[j] * row[k];
      }
    }
    for (std::size_t i = 0; i < n * n; ++i) matrix_sum[i] += matrix[i];
    for (std::size_t i = 0; i < n; ++i) rhs_sum[i] += rhs[i];
    problem.matrix.push_back(std::move(matrix));
    problem.rhs.push_back(std::move(rhs));
  }
  problem.optimum = solve(matrix_sum, rhs_sum);
  const CounterRng start(seed, RngUse::init);
  for (std::size_t j = 0; j < n; ++j)
    problem.start.push_back((2.0 * start.uniform(j) - 1.0) / std::sqrt(static_cast<double>(n)));
  return problem;
}

double regression_distance(const RegressionProblem& problem, const CompressOptions& options, double density,
                           int iterations) {
  std::vector<std::vector<float>> matrix, rhs;
  for (const auto& values : problem.matrix) matrix.emplace_back(values.begin(), values.end());
  for (const auto& values : problem.rhs) rhs.emplace_back(values.begin(), values.end());
  std::vector<float> w(problem.start.begin(), problem.start.end());
  Ranks ranks(options, problem.dims, problem.ranks);
  for (int t = 0; t < iterations; ++t) {
    for (std::size_t r = 0; r < ranks.size(); ++r)
      gradient_at(matrix[r].data(), rhs[r].data(), w.data(), w.size(), ranks.gradient(r).data());
    const std::span<const float> average = ranks.step(density);
    for (std::size_t j = 0; j < w.size(); ++j) w[j] -= static_cast<float>(kLearningRate) * average[j];
    if (!std::isfinite(w[0])) return std::numeric_limits<double>::infinity();
  }
  double squares = 0;
  for (std::size_t j = 0; j < w.size(); ++j) {
    const double difference = static_cast<double>(w[j]) - problem.optimum[j];
    squares += difference * difference;
  }
  return std::log10(squares);
}

ToyTrace toy_trace(const CompressOptions& options, int iterations) {
  constexpr double points[2][2] = {{100, 1}, {-100, 1}};
  constexpr double learning_rate = 0.9;
  std::array<double, 2> w = {0, 1};
  Ranks ranks(options, 2, 2);
  ToyTrace trace;
  const auto record = [&] {
    double loss = 0;
    for (const auto& x : points) loss += std::log1p(std::exp(-(w[0] * x[0] + w[1] * x[1]))) / 2;
    trace.loss.push_back(loss);
    trace.weights.push_back(w);
  };
  record();
  for (int t = 0; t < iterations; ++t) {
    for (std::size_t r = 0; r < 2; ++r) {
      const auto& x = points[r];
      const double slope = -1 / (1 + std::exp(w[0] * x[0] + w[1] * x[1]));
      for (std::size_t j = 0; j < 2; ++j) ranks.gradient(r)[j] = static_cast<float>(slope * x[j]);
    }
    const std::span<const float> average = ranks.step(0.5);
    for (std::size_t j = 0; j < 2; ++j) w[j] -= learning_rate * static_cast<double>(average[j]);
    if (!ranks.sent()[0].indices.empty())
      trace.sent.push_back({ranks.sent()[0].indices.at(0), ranks.sent()[1].indices.at(0)});
    record();
  }
  return trace;
}

namespace {

struct Method {
  std::string label;
  CompressOptions options;
};

std::vector<Method> methods_of(const std::vector<double>& mus) {
  std::vector<Method> methods(2);
  methods[0].label = methods[0].options.name = "dense";
  methods[1].label = methods[1].options.name = "topk";
  for (const std::string variant : {"A", "B"})
    for (const double mu : mus) {
      if (variant == "B" && mu != 4 && mus.size() > 1) continue;  // it fails at every mu
      Method method{fmt::format("regtopk {}, mu {:g}", variant, mu), {}};
      method.options.name = "regtopk";
      method.options.set("variant", variant);
      method.options.set("mu", mu);
      methods.push_back(method);
    }
  return methods;
}

struct Run {
  std::size_t method, s, seed;
  double distance = 0;  // log10 of its square
};

void run_regression(const ExperimentArguments& arguments) {
  const int iterations = static_cast<int>(arguments.integer("iterations", 1, 1000000));
  const std::vector<double> shares = arguments.numbers("s", 0.01, 1);
  const std::vector<Method> methods = methods_of(arguments.numbers("mu", 1e-6, 1e9));
  const auto seeds = arguments.integers("seeds", 0, 1000000000);
  const std::string out = arguments.folder();

  std::vector<RegressionProblem> problems(seeds.size());
  std::vector<Run> runs;
  for (std::size_t m = 0; m < methods.size(); ++m)
    for (std::size_t s = 0; s < shares.size(); ++s)
      for (std::size_t i = 0; i < seeds.size(); ++i)
        if (m > 0 || s == 0) runs.push_back({m, s, i});  // dense has no S
  std::printf("%zu runs of %d steps, 20 workers, J = 100\n", runs.size(), iterations);
  std::fflush(stdout);
  in_parallel(seeds.size(),
              [&](std::size_t i) { problems[i] = make_regression(static_cast<std::uint64_t>(seeds[i])); });
  in_parallel(runs.size(), [&](std::size_t i) {
    Run& run = runs[i];
    run.distance =
        regression_distance(problems[run.seed], methods[run.method].options, shares[run.s], iterations);
  });

  std::string lines, csv = "method,S,median,least,greatest";
  for (const auto seed : seeds) csv += fmt::format(",seed {}", seed);
  csv += "\n";
  for (const Run& run : runs) {
    const Method& method = methods[run.method];
    nlohmann::ordered_json line = {{"method", method.options.name}};
    if (method.options.name == "regtopk")
      line["variant"] = method.options.given<std::string>("variant"),
      line["mu"] = method.options.given<double>("mu");
    if (run.method > 0) line["S"] = shares[run.s];
    line["seed"] = seeds[run.seed];
    line["iterations"] = iterations;
    line["log10_squared_distance"] = run.distance;  // null where it diverged
    lines += line.dump() + "\n";
  }

  std::vector<LegendEntry> legend;
  std::vector<PlannedMethod> drawn;
  for (const Method& method : methods) drawn.push_back({method.options.name, method.label});
  std::vector<LineStyle> styles = line_styles(drawn);
  styles[0].dash = "6 4";  // dense lies on others
  double lowest = 0, highest = 0;
  Table table;
  table.header = {"S"};
  for (const Method& method : methods) table.header.push_back(method.label);
  for (const double share : shares) table.rows.push_back({fmt::format("{:.2f}", share)});
  Panel panel;
  for (std::size_t m = 0; m < methods.size(); ++m) {
    Line line = line_of(styles[m], methods[m].label);
    Band band;
    for (std::size_t s = 0; s < shares.size(); ++s) {
      std::vector<double> values;
      for (const Run& run : runs)
        if (run.method == m && run.s == (m > 0 ? s : 0)) values.push_back(run.distance);
      const double median = quantile(values, 0.5), lo = quantile(values, 0), hi = quantile(values, 1);
      table.rows[s].push_back(fmt::format("{:.2f} [{:.2f}, {:.2f}]", median, lo, hi));
      csv += fmt::format("\"{}\",{:g},{:.4f},{:.4f},{:.4f}", methods[m].label, shares[s], median, lo, hi);
      for (const double value : values) csv += fmt::format(",{:.4f}", value);
      csv += "\n";
      line.points.push_back({shares[s], median});
      band.upper.push_back({shares[s], hi});
      band.lower.push_back({shares[s], lo});
      if (std::isfinite(hi)) highest = std::max(highest, hi);
      if (std::isfinite(lo)) lowest = std::min(lowest, lo);
    }
    band.colour = line.colour;
    line.dots = m > 0;
    panel.lines.push_back(line);
    panel.bands.push_back(band);
    legend.push_back({methods[m].label, styles[m]});
  }
  const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
  panel.x.ticks = linear_ticks(*least, *most, 9, Unit::plain);
  panel.x.lo = *least - 0.03;  // the neighbour's labels need room
  panel.x.hi = *most + 0.03;
  panel.x.label = "S, the share of entries that is sent";
  std::printf("\nlog10 |w - w*|^2 after %d steps: median [least, greatest] of %zu seeds\n%s", iterations,
              seeds.size(), table_text(table).c_str());
  panel.y.lo = lowest - 1;
  panel.y.hi = highest + 1;
  panel.y.ticks = linear_ticks(panel.y.lo, panel.y.hi, 6, Unit::plain);
  panel.y.label = "log10 |w - w*|²";
  write_file(out + "/regression.csv", csv);
  write_file(out + "/regression.jsonl", lines);
  write_file(
      out + "/regression.svg",
      stand_alone_plot({panel}, legend, "Distance to the optimum over the share of entries that is sent"));
  std::printf("\nWritten: regression.csv, regression.jsonl and regression.svg in %s\n", out.c_str());
}

const bool regression_registered = [] {
  experiments().add("regression", "RegTop-k's linear regression: distance to the optimum over the sparsity",
                    {{{"iterations", "2500", "steps"},
                      {"s", "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0", "shares of entries that are sent"},
                      {"mu", "1,4,10", "RegTop-k's mu; variant B runs at 4 alone where several are given"},
                      {"seeds", "1,2,3,4,5", "one problem each"},
                      {"out", "studies/regression", "folder of regression.csv, .jsonl and .svg"}},
                     run_regression});
  return true;
}();

void run_toy(const ExperimentArguments& arguments) {
  const int iterations = static_cast<int>(arguments.integer("iterations", 1, 1000000));
  std::vector<std::string> labels = {"dense", "topk"};
  std::vector<CompressOptions> methods(2);
  methods[0].name = "dense";
  methods[1].name = "topk";
  for (const double mu : arguments.numbers("mu", 1e-6, 1e9)) {
    labels.push_back("regtopk A, mu " + short_text(mu));
    methods.emplace_back().name = "regtopk";
    methods.back().set("mu", mu);
  }
  const std::string out = arguments.folder();
  std::vector<ToyTrace> traces;
  for (const CompressOptions& options : methods) traces.push_back(toy_trace(options, iterations));

  std::string csv = "step", lines;
  for (const std::string& label : labels) csv += ",\"" + label + "\"";
  csv += "\n";
  Table table;
  table.header = {"step"};
  for (const std::string& label : labels) table.header.push_back(label);
  for (int t = 0; t <= iterations; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const bool shown = t <= 2 || t == 4 || t == 10 || t == 50 || t == 100 || t == 101 || t == iterations;
    if (shown) table.rows.push_back({std::to_string(t)});
    csv += std::to_string(t);
    for (std::size_t m = 0; m < methods.size(); ++m) {
      csv += "," + fmt::format("{:.17g}", traces[m].loss[at]);
      if (shown) table.rows.back().push_back(fmt::format("{:.9g}", traces[m].loss[at]));
      nlohmann::ordered_json line = {{"step", t}, {"method", methods[m].name}};
      if (methods[m].name == "regtopk") line["mu"] = methods[m].given<double>("mu");
      line["loss"] = traces[m].loss[at];
      line["weights"] = traces[m].weights[at];
      if (at < traces[m].sent.size()) line["sends"] = traces[m].sent[at];
      lines += line.dump() + "\n";
    }
    csv += "\n";
  }

  Panel panel;
  std::vector<LegendEntry> legend;
  std::vector<PlannedMethod> drawn;
  for (std::size_t m = 0; m < methods.size(); ++m) drawn.push_back({methods[m].name, labels[m]});
  std::vector<LineStyle> styles = line_styles(drawn);
  styles[0].dash = "6 4";  // dense lies on topk
  double lowest = 1;
  for (std::size_t m = 0; m < methods.size(); ++m) {
    Line line = line_of(styles[m], labels[m]);
    for (std::size_t t = 0; t < traces[m].loss.size(); ++t) {
      line.points.push_back({static_cast<double>(t), traces[m].loss[t]});
      if (traces[m].loss[t] > 0) lowest = std::min(lowest, traces[m].loss[t]);
    }
    legend.push_back({labels[m], styles[m]});
    panel.lines.push_back(std::move(line));
  }
  std::rotate(panel.lines.begin(), panel.lines.begin() + 1, panel.lines.end());  // dense lies on top
  panel.x.hi = iterations;
  panel.x.ticks = linear_ticks(0, iterations, 10, Unit::plain);
  panel.x.label = "steps";
  panel.y.lo = lowest / 2;
  panel.y.hi = 1;
  panel.y.logarithmic = true;
  panel.y.ticks = log_ticks(panel.y.lo, panel.y.hi, Unit::plain);
  panel.y.label = "loss";
  write_file(out + "/toy.csv", csv);
  write_file(out + "/toy.jsonl", lines);
  write_file(out + "/toy.svg", stand_alone_plot({panel}, legend, "Loss of the toy problem over steps"));
  std::printf("Loss after so many steps\n%s\nWritten: toy.csv, toy.jsonl and toy.svg in %s\n",
              table_text(table).c_str(), out.c_str());
}

const bool toy_registered = [] {
  experiments().add("toy", "RegTop-k's toy problem: two workers whose large entries cancel, step by step",
                    {{{"iterations", "150", "steps"},
                      {"mu", "1,2,4", "RegTop-k's mu"},
                      {"out", "studies/toy", "folder of toy.csv, .jsonl and .svg"}},
                     run_toy});
  return true;
}();

}  // namespace
}  // namespace topknot
