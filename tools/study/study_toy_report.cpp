// `study toy`: RegTop-k's toy problem, step by step.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "nn/core/base/text.h"
#include "tools/common/study_plot.h"
#include "tools/compare/compare.h"
#include "tools/study/study.h"
#include "tools/study/study_toy.h"
#include "train/metrics/run_directory.h"

namespace topknot {
namespace {

std::string number_text(double value, int digits) {
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
  return buffer;
}

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
      csv += "," + number_text(traces[m].loss[at], 17);
      if (shown) table.rows.back().push_back(number_text(traces[m].loss[at], 9));
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
  std::vector<std::pair<std::string, std::string>> legend;
  double lowest = 1;
  for (std::size_t m = 0; m < methods.size(); ++m) {
    Line line;
    for (std::size_t t = 0; t < traces[m].loss.size(); ++t) {
      line.points.push_back({static_cast<double>(t), traces[m].loss[t]});
      if (traces[m].loss[t] > 0) lowest = std::min(lowest, traces[m].loss[t]);
    }
    line.colour = study_colour(m);
    line.title = labels[m];
    if (m == 0) line.dash = "6 4";
    legend.emplace_back(labels[m], line.colour);
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
  write_file(out + "/toy.svg", study_plot({panel}, legend, "Loss of the toy problem over steps"));
  std::printf("Loss after so many steps, float64\n%s\nWritten: toy.csv, toy.jsonl and toy.svg in %s\n",
              table_text(table).c_str(), out.c_str());
}

const bool registered = [] {
  studies().add("toy", "RegTop-k's toy problem: two workers whose large entries cancel, step by step",
                {{{"iterations", "150", "steps"},
                  {"mu", "1,2,4", "RegTop-k's mu"},
                  {"out", "studies/toy", "folder of toy.csv, .jsonl and .svg"}},
                 run_toy});
  return true;
}();

}  // namespace
}  // namespace topknot
