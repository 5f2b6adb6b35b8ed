// `study toy`: RegTop-k's toy problem, step by step.
#include "tools/study/study_toy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "nn/base/text.h"
#include "tools/common/chart.h"
#include "tools/common/page.h"
#include "tools/study/study.h"
#include "tools/study/study_ranks.h"
#include "train/metrics/output_file.h"

namespace topknot {

ToyTrace toy_trace(const CompressOptions& options, int iterations) {
  constexpr double points[2][2] = {{100, 1}, {-100, 1}};
  constexpr double learning_rate = 0.9;
  std::array<double, 2> w = {0, 1};
  StudyRanks ranks(options, 2, 2);
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

void run_toy(const StudyArguments& arguments) {
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
    Line line;
    for (std::size_t t = 0; t < traces[m].loss.size(); ++t) {
      line.points.push_back({static_cast<double>(t), traces[m].loss[t]});
      if (traces[m].loss[t] > 0) lowest = std::min(lowest, traces[m].loss[t]);
    }
    line.colour = styles[m].colour;
    line.dash = styles[m].dash;
    line.title = labels[m];
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

const bool study_toy_registered = [] {
  studies().add("toy", "RegTop-k's toy problem: two workers whose large entries cancel, step by step",
                {{{"iterations", "150", "steps"},
                  {"mu", "1,2,4", "RegTop-k's mu"},
                  {"out", "studies/toy", "folder of toy.csv, .jsonl and .svg"}},
                 run_toy});
  return true;
}();

}  // namespace
}  // namespace topknot
