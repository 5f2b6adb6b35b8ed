// `study regression`: how far RegTop-k, Top-k and dense SGD end from the optimum, over the sparsity S.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>

#include "nn/core/base/text.h"
#include "tools/common/study_plot.h"
#include "tools/compare/compare.h"
#include "tools/study/study.h"
#include "tools/study/study_regression.h"
#include "train/metrics/run_directory.h"

namespace topknot {
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
      if (variant == "B" && mu != 4 && mus.size() > 1) continue;  // it fails at each mu alike
      Method method{"regtopk " + variant + ", mu " + short_text(mu), {}};
      method.options.name = "regtopk";
      method.options.set("variant", variant);
      method.options.set("mu", mu);
      methods.push_back(method);
    }
  return methods;
}

struct Run {
  std::size_t precision, method, s, seed;
  double distance = 0;  // log10 of its square
};

struct Spread {
  double median = 0, lo = 0, hi = 0;
};

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return {(values[(n - 1) / 2] + values[n / 2]) / 2, values.front(), values.back()};
}

std::string fixed(double value, int decimals) {
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, "%.*f", decimals, value);
  return buffer;
}

constexpr const char* kPrecisions[] = {"float64", "float32"};

void run_regression(const StudyArguments& arguments) {
  const int iterations = static_cast<int>(arguments.integer("iterations", 1, 1000000));
  const std::vector<double> shares = arguments.numbers("s", 0.01, 1);
  const std::vector<Method> methods = methods_of(arguments.numbers("mu", 1e-6, 1e9));
  const auto seeds = arguments.integers("seeds", 0, 1000000000);
  const std::string out = arguments.folder();

  std::vector<RegressionProblem> problems(seeds.size());
  std::vector<Run> runs;
  for (std::size_t p = 0; p < 2; ++p)
    for (std::size_t m = 0; m < methods.size(); ++m)
      for (std::size_t s = 0; s < shares.size(); ++s)
        for (std::size_t i = 0; i < seeds.size(); ++i)
          if (m > 0 || s == 0) runs.push_back({p, m, s, i});  // dense has no S
  std::printf("%zu runs of %d steps, 20 workers, J = 100\n", runs.size(), iterations);
  std::fflush(stdout);
  std::exception_ptr failure;
  const auto in_parallel = [&](std::size_t count, const auto& body) {
#pragma omp parallel for schedule(dynamic, 1)
    for (std::size_t i = 0; i < count; ++i) try {
        body(i);
      } catch (...) {
#pragma omp critical(study_regression_failure)
        failure = std::current_exception();
      }
    if (failure) std::rethrow_exception(failure);
  };
  in_parallel(seeds.size(),
              [&](std::size_t i) { problems[i] = make_regression(static_cast<std::uint64_t>(seeds[i])); });
  in_parallel(runs.size(), [&](std::size_t i) {
    Run& run = runs[i];
    const auto& options = methods[run.method].options;
    const auto distance = run.precision == 0 ? regression_distance<double> : regression_distance<float>;
    run.distance = distance(problems[run.seed], options, shares[run.s], iterations);
  });

  std::string lines, csv = "precision,method,S,median,least,greatest";
  for (const auto seed : seeds) csv += ",seed " + std::to_string(seed);
  csv += "\n";
  for (const Run& run : runs) {
    const Method& method = methods[run.method];
    nlohmann::ordered_json line = {{"precision", kPrecisions[run.precision]},
                                   {"method", method.options.name}};
    if (method.options.name == "regtopk")
      line["variant"] = method.options.given<std::string>("variant"),
      line["mu"] = method.options.given<double>("mu");
    if (run.method > 0) line["S"] = shares[run.s];
    line["seed"] = seeds[run.seed];
    line["iterations"] = iterations;
    line["log10_squared_distance"] = run.distance;  // null where it diverged
    lines += line.dump() + "\n";
  }

  std::vector<Panel> panels;
  std::vector<std::pair<std::string, std::string>> legend;
  double lowest = 0, highest = 0;
  for (std::size_t p = 0; p < 2; ++p) {
    Table table;
    table.header = {"S"};
    for (const Method& method : methods) table.header.push_back(method.label);
    for (const double share : shares) table.rows.push_back({fixed(share, 2)});
    Panel panel;
    for (std::size_t m = 0; m < methods.size(); ++m) {
      Line line;
      Band band;
      for (std::size_t s = 0; s < shares.size(); ++s) {
        std::vector<double> values;
        for (const Run& run : runs)
          if (run.precision == p && run.method == m && run.s == (m > 0 ? s : 0))
            values.push_back(run.distance);
        const Spread spread = spread_of(values);
        table.rows[s].push_back(fixed(spread.median, 2) + " [" + fixed(spread.lo, 2) + ", " +
                                fixed(spread.hi, 2) + "]");
        csv += std::string(kPrecisions[p]) + ",\"" + methods[m].label + "\"," + short_text(shares[s]);
        for (const double value : {spread.median, spread.lo, spread.hi}) csv += "," + fixed(value, 4);
        for (const double value : values) csv += "," + fixed(value, 4);
        csv += "\n";
        line.points.push_back({shares[s], spread.median});
        band.upper.push_back({shares[s], spread.hi});
        band.lower.push_back({shares[s], spread.lo});
        if (std::isfinite(spread.hi)) highest = std::max(highest, spread.hi);
        if (std::isfinite(spread.lo)) lowest = std::min(lowest, spread.lo);
      }
      line.colour = band.colour = study_colour(m);
      line.dots = m > 0;
      if (m == 0) line.dash = "6 4";
      line.title = methods[m].label;
      panel.lines.push_back(line);
      panel.bands.push_back(band);
      if (p == 0) legend.emplace_back(methods[m].label, line.colour);
    }
    const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
    panel.x.ticks = linear_ticks(*least, *most, 9, Unit::plain);
    panel.x.lo = *least - 0.03;  // the neighbour's labels need room
    panel.x.hi = *most + 0.03;
    panel.x.label = std::string("S, the share of entries that travels (") + kPrecisions[p] + ")";
    panels.push_back(panel);
    std::printf("\nlog10 |w - w*|^2 in %s after %d steps: median [least, greatest] of %zu seeds\n%s",
                kPrecisions[p], iterations, seeds.size(), table_text(table).c_str());
  }
  for (Panel& panel : panels) {
    panel.y.lo = lowest - 1;
    panel.y.hi = highest + 1;
    panel.y.ticks = linear_ticks(panel.y.lo, panel.y.hi, 6, Unit::plain);
    panel.y.label = "log10 |w - w*|²";
  }
  write_file(out + "/regression.csv", csv);
  write_file(out + "/regression.jsonl", lines);
  write_file(out + "/regression.svg",
             study_plot(panels, legend, "Distance to the optimum over the share of entries that travels"));
  std::printf("\nWritten: regression.csv, regression.jsonl and regression.svg in %s\n", out.c_str());
}

const bool registered = [] {
  studies().add("regression", "RegTop-k's linear regression: distance to the optimum over the sparsity",
                {{{"iterations", "2500", "steps"},
                  {"s", "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0", "shares of entries that travel"},
                  {"mu", "1,4,10", "RegTop-k's mu; variant B runs at 4 alone where several are given"},
                  {"seeds", "1,2,3,4,5", "one problem each"},
                  {"out", "studies/regression", "folder of regression.csv, .jsonl and .svg"}},
                 run_regression});
  return true;
}();

}  // namespace
}  // namespace topknot
