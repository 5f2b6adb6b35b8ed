// `experiment accuracy`: draws a summary.csv of scripts/train-runs: test accuracy over density, and over how
// many times less than dense a rank sends. Rows are named METHOD-dDENSITY; `dense` is the reference; other
// rows stay in the table.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "tools/common/chart.h"
#include "tools/experiment/experiment.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

struct Row {
  std::string method;
  double density = 0, accuracy = 0, ratio = 0;
};

double number_of(const std::vector<std::string>& cells, std::size_t column, const std::string& where) {
  try {
    return std::stod(cells.at(column));
  } catch (const std::exception&) {
    throw UserError(
        fmt::format("{}: column {} holds no number; the file is not a summary.csv of scripts/train-runs",
                    where, column + 1));
  }
}

std::vector<Row> read_summary(const std::string& path) {
  if (path.empty())
    throw UserError("in=FILE is missing; scripts/train-runs writes summary.csv into its folder");
  std::ifstream in = open_stream(path);
  std::vector<Row> rows;
  std::string line;
  std::getline(in, line);
  if (line.rfind("run,seeds,accuracy,", 0) != 0)
    throw UserError("in=" + path +
                    ": not a summary.csv of scripts/train-runs, which begins with run,seeds,accuracy");
  for (int number = 2; std::getline(in, line); ++number) {
    const auto cells = cells_of(line);
    const std::string where = fmt::format("{}:{}", path, number);
    if (cells.empty()) continue;
    Row row;
    const auto dash = cells[0].rfind("-d");
    row.method = cells[0].substr(0, dash);
    if (cells[0] != "dense") {
      if (dash == std::string::npos) continue;
      row.density = number_of({cells[0].substr(dash + 2)}, 0, where);
      if (row.density <= 0) throw UserError(where + ": a density must be above 0");
    }
    row.accuracy = number_of(cells, 2, where);
    row.ratio = number_of(cells, 4, where);
    rows.push_back(row);
  }
  return rows;
}

void run_accuracy(const ExperimentArguments& arguments) {
  const std::vector<Row> rows = read_summary(arguments.text("in"));
  std::map<std::string, std::vector<Row>> methods;
  double dense = 0, lo = 1, greatest_ratio = 10, highest = 10;
  for (const Row& row : rows) {
    highest = std::max(highest, row.accuracy);
    if (row.density == 0) {
      dense = row.accuracy;
      continue;
    }
    methods[row.method].push_back(row);
    lo = std::min(lo, row.density);
    greatest_ratio = std::max(greatest_ratio, row.ratio);
  }
  if (methods.empty()) throw UserError("in=" + arguments.text("in") + ": no row is named METHOD-dDENSITY");
  const std::string out = arguments.folder();

  std::vector<Panel> panels(2);
  for (Panel& panel : panels) {
    panel.y.hi = 10 * std::ceil((highest + 1) / 10);
    panel.y.ticks = linear_ticks(0, panel.y.hi, 7, Unit::plain);
    panel.y.label = "test accuracy, %";
    panel.x.logarithmic = true;
    panel.reference = dense;
    if (dense > 0) panel.reference_label = "dense";
  }
  panels[0].x.lo = lo / 1.3;
  panels[0].x.hi = 1;
  panels[0].x.label = "density";
  panels[1].x.lo = 1;
  panels[1].x.hi = 1.3 * greatest_ratio;
  panels[1].x.label = "times less than dense that a rank sends";
  for (Panel& panel : panels) panel.x.ticks = log_ticks(panel.x.lo, panel.x.hi, Unit::plain);
  std::vector<LegendEntry> legend;
  std::vector<PlannedMethod> lines;
  for (const auto& [method, points] : methods) lines.push_back({method, ""});
  const std::vector<LineStyle> styles = line_styles(lines);
  for (auto& [method, points] : methods) {
    std::sort(points.begin(), points.end(), [](const Row& a, const Row& b) { return a.density < b.density; });
    legend.push_back({method, styles[legend.size()]});
    Line by_density = line_of(legend.back().style, method), by_ratio = by_density;
    for (const Row& row : points) {
      by_density.points.push_back({row.density, row.accuracy});
      by_ratio.points.push_back({row.ratio, row.accuracy});
      panels[0].marks.push_back({by_density.points.back(), by_density.colour});
      panels[1].marks.push_back({by_ratio.points.back(), by_density.colour});
    }
    panels[0].lines.push_back(std::move(by_density));
    panels[1].lines.push_back(std::move(by_ratio));
  }
  write_file(out + "/accuracy.svg",
             stand_alone_plot(panels, legend, "Test accuracy over density and over bytes saved"));
  std::printf("Written: accuracy.svg in %s\n", out.c_str());
}

const bool accuracy_registered = [] {
  experiments().add("accuracy",
                    "the summary of scripts/train-runs as a plot: accuracy over density and bytes",
                    {{{"in", "", "summary.csv of scripts/train-runs"},
                      {"out", "studies/accuracy", "folder of accuracy.svg"}},
                     run_accuracy});
  return true;
}();

}  // namespace
}  // namespace topknot
