// `experiment selection`: the entries that each selector selects of recorded gradients, and its cost over
// sizes.

#include "tools/experiment/selection.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <new>
#include <nlohmann/json.hpp>
#include <sstream>

#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/threads.h"
#include "tools/common/chart.h"
#include "tools/common/page.h"
#include "tools/experiment/experiment.h"
#include "train/metrics/npy.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

constexpr std::int64_t kLeastLog2 = 16, kFullRoundsLog2 = 22;

// Bytes that can be had without swapping; 0 if the system does not say.
std::size_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("MemAvailable:")) {
      std::size_t kib = 0;
      std::istringstream(line.substr(13)) >> kib;
      return kib << 10;
    }
  return 0;
}

template <class Row>
std::vector<std::string> labels_of(const std::vector<Row>& rows) {
  std::vector<std::string> labels;
  for (const Row& row : rows)
    if (std::find(labels.begin(), labels.end(), row.label) == labels.end()) labels.push_back(row.label);
  return labels;
}

constexpr int kLabelRoom = 80;

// The method that a selector serves: "sidco" of "sidco pareto".
std::string method_of(const std::string& label) {
  const std::string name = label.substr(0, label.find(' '));
  return name == "dgc_sampled" ? "dgc" : name;
}

// A panel per density with a row per method: a ring at `middle`, a line from `lo` to `hi` of the method.
template <class Middle, class Ends>
std::string row_plot(const std::vector<SelectionQuality>& rows, Scale x, const std::string& what,
                     const std::string& legend, const std::string& description, Middle middle, Ends ends) {
  const std::vector<std::string> labels = labels_of(rows);
  const auto n = static_cast<double>(labels.size());
  std::vector<double> densities;
  for (const SelectionQuality& row : rows)
    if (std::find(densities.begin(), densities.end(), row.density) == densities.end())
      densities.push_back(row.density);
  std::vector<Panel> panels;
  for (const double density : densities) {
    Panel panel;
    panel.x = x;
    panel.x.label = what + ", density " + short_text(density);
    panel.values = false;
    panel.y.lo = -0.6;
    panel.y.hi = n - 0.4;
    for (std::size_t i = 0; i < labels.size(); ++i)
      panel.y.ticks.push_back({n - 1 - static_cast<double>(i), labels[i]});
    panel.lines.push_back({{{1, panel.y.lo}, {1, panel.y.hi}}, kInk, 1, 1, "1.5 3", false, false, ""});
    for (const SelectionQuality& row : rows) {
      if (row.density != density || !std::isfinite(middle(row))) continue;
      const auto place = std::find(labels.begin(), labels.end(), row.label) - labels.begin();
      const double y = n - 1 - static_cast<double>(place);
      const auto inside = [&](double value) { return std::clamp(value, x.lo, x.hi); };
      const auto [lo, hi] = ends(row);
      Line line;
      line.points = {{inside(lo), y}, {inside(hi), y}};
      line.colour = method_colour(method_of(row.label));
      line.title = row.label + ": " + short_text(middle(row));
      panel.lines.push_back(line);
      panel.marks.push_back({{inside(middle(row)), y}, line.colour});
    }
    panels.push_back(panel);
  }
  return stand_alone_plot(panels, {{legend, {kInk, ""}}}, description, kLabelRoom);
}

// A row per method, a panel per density: the mean of count / k, over a line from the least to the greatest.
std::string selection_count_plot(const std::vector<SelectionQuality>& rows) {
  Scale x;
  x.logarithmic = true;
  x.lo = 0.05;
  x.hi = 20;
  x.ticks = log_ticks(0.1, 10, Unit::plain);
  std::erase_if(x.ticks, [](const Tick& tick) { return std::fmod(std::log10(tick.value) + 9, 1) > 0.01; });
  return row_plot(
      rows, x, "selected / k", "mean, and from the least to the greatest step; at an edge: beyond it",
      "Selected entries over k by selector and density",
      [](const SelectionQuality& row) { return row.count_mean; },
      [](const SelectionQuality& row) { return std::pair(row.count_least, row.count_greatest); });
}

// The same for the captured energy relative to topk's.
std::string selection_energy_plot(const std::vector<SelectionQuality>& rows) {
  Scale x;
  x.lo = -0.05;
  x.hi = 2.05;
  x.ticks = linear_ticks(0, 1.5, 3, Unit::plain);  // 2.0 would touch the next panel's 0.0
  return row_plot(
      rows, x, "energy / topk's",
      "captured energy over that of the same vector's k largest; at the edge: beyond it",
      "Captured energy relative to exact top-k by selector and density",
      [](const SelectionQuality& row) { return row.energy_to_topk; },
      [](const SelectionQuality& row) { return std::pair(0.0, row.energy_to_topk); });
}

// The ratio to the plain pass over the size, a line per method.
std::string selection_cost_plot(const std::vector<SelectionCost>& rows) {
  Panel panel;
  std::vector<LegendEntry> legend;
  const std::vector<std::string> labels = labels_of(rows);
  std::vector<PlannedMethod> lines;
  for (const std::string& label : labels) lines.push_back({method_of(label), label});
  const std::vector<LineStyle> styles = line_styles(lines);
  double lo = 1, hi = 2, first = 64, last = 0;
  for (std::size_t m = 0; m < labels.size(); ++m) {
    Line line = line_of(styles[m], labels[m]);
    for (const SelectionCost& row : rows) {
      if (row.label != labels[m]) continue;
      const double size = std::log2(static_cast<double>(row.size));
      line.points.push_back({size, row.ratio});
      lo = std::min(lo, row.ratio);
      hi = std::max(hi, row.ratio);
      first = std::min(first, size);
      last = std::max(last, size);
    }
    line.dots = true;
    legend.push_back({labels[m], styles[m]});
    panel.lines.push_back(std::move(line));
  }
  std::rotate(panel.lines.begin(), panel.lines.begin() + 1, panel.lines.end());  // topk lies on top
  panel.x.lo = first - 0.3;
  panel.x.hi = last + 0.3;
  for (double size = first; size <= last; size += 2) panel.x.ticks.push_back({size, "2^" + short_text(size)});
  panel.x.label = "elements";
  panel.y.logarithmic = true;
  panel.y.lo = lo / 1.15;
  panel.y.hi = hi * 1.15;
  panel.y.ticks = log_ticks(panel.y.lo, panel.y.hi, Unit::plain);
  panel.y.label = "time of a step / r += g";
  panel.reference = 1;
  panel.reference_label = "one r += g pass";
  return stand_alone_plot({panel}, legend, "Time of selection relative to a plain pass over the size");
}

// All keys, whether or not they are used: a wrong one is an error in any case.
struct SelectionArguments {
  explicit SelectionArguments(const ExperimentArguments& arguments)
      : in(arguments.text("in")),
        densities(arguments.numbers("densities", 1e-9, 1)),
        skip(static_cast<std::size_t>(arguments.integer("skip", 0, 1000000000))),
        density(arguments.numbers("density", 1e-9, 1).at(0)),
        max_log2(arguments.integer("max_log2", 0, 30)),
        rounds(arguments.integer("rounds", 1, 1000000)),
        threads(static_cast<int>(arguments.integer("threads", 0, 1024))) {}
  std::string in;
  std::vector<double> densities;
  std::size_t skip;
  double density;
  std::int64_t max_log2, rounds;
  int threads;
};

void run_quality(const SelectionArguments& arguments, const std::string& out) {
  const std::string& path = arguments.in;
  const std::vector<double>& densities = arguments.densities;
  const std::size_t skip = arguments.skip;
  const NpyReader reader(path);
  const auto& shape = reader.shape();
  if (shape.size() != 2 || shape[0] == 0 || shape[1] == 0 || shape[1] >= std::size_t{1} << 31)
    throw UserError(
        fmt::format("in: {} has shape {}; needed is [steps, elements], as train.record_gradients writes it",
                    path, npy_shape_text(shape)));
  const std::size_t steps = shape[0], numel = shape[1];
  if (skip >= steps)
    throw UserError(fmt::format("skip is {} and {} has {} steps: none would count; lower skip or record more",
                                skip, path, steps));
  std::printf("%zu steps of %zu elements; the first %zu fill the residual and do not count\n", steps, numel,
              skip);
  std::fflush(stdout);
  const auto rows =
      selection_quality(selection_methods(), densities, steps, numel, skip,
                        [&](std::size_t t, std::span<float> gradient) { reader.read(t * numel, gradient); });

  ExperimentRows results;
  for (const SelectionQuality& row : rows)
    results.add({{"selector", row.label},
                 {"density", row.density},
                 {"k", row.k},
                 {"steps", row.steps},
                 {"count_mean", row.count_mean},
                 {"count_least", row.count_least},
                 {"count_greatest", row.count_greatest},
                 {"within_10_percent", row.within},
                 {"energy", row.energy},
                 {"energy_to_topk", row.energy_to_topk},
                 {"threshold_median", row.threshold}});
  for (const double density : densities) {
    Table table;
    table.header = {"selector",    "selected / k", "least",          "greatest",
                    "within 10 %", "energy",       "energy / topk's"};
    std::size_t k = 0;
    for (const SelectionQuality& row : rows) {
      if (row.density != density) continue;
      k = row.k;
      table.rows.push_back({row.label, fmt::format("{:.3f}", row.count_mean),
                            fmt::format("{:.3f}", row.count_least), fmt::format("{:.3f}", row.count_greatest),
                            fmt::format("{:.1f} %", 100 * row.within), fmt::format("{:.5f}", row.energy),
                            fmt::format("{:.4f}", row.energy_to_topk)});
    }
    std::printf("\ndensity %s, k = %zu\n%s", short_text(density).c_str(), k, table_text(table).c_str());
  }
  write_file(out + "/selection_quality.csv", results.csv);
  write_file(out + "/selection_quality.jsonl", results.jsonl);
  write_file(out + "/selection_count.svg", selection_count_plot(rows));
  write_file(out + "/selection_energy.svg", selection_energy_plot(rows));
  std::printf(
      "\nWritten: selection_quality.csv and .jsonl, selection_count.svg, selection_energy.svg in %s\n",
      out.c_str());
  std::fflush(stdout);
}

void run_cost(const SelectionArguments& arguments, const std::string& out) {
  const double density = arguments.density;
  const std::int64_t rounds = arguments.rounds;
  const int threads = arguments.threads > 0 ? set_team_size(arguments.threads) : team_size();
  std::vector<SelectionCost> rows;
  ExperimentRows results;
  for (std::int64_t log2 = kLeastLog2; log2 <= arguments.max_log2; log2 += 2) {
    const std::size_t size = std::size_t{1} << log2;
    const std::size_t needed = selection_cost_bytes(size), available = available_bytes();
    const auto skipped = [&](const std::string& why) {
      std::printf("\n2^%d elements: skipped, %s\n", static_cast<int>(log2), why.c_str());
    };
    if (available > 0 && needed > available) {
      skipped(fmt::format("they need {:.1f} GiB of memory and {:.1f} are available",
                          static_cast<double>(needed) * 0x1p-30, static_cast<double>(available) * 0x1p-30));
      continue;
    }
    const std::int64_t fewer = rounds >> std::clamp<std::int64_t>(log2 - kFullRoundsLog2, 0, 30);
    const int measured = static_cast<int>(std::max(fewer, std::min<std::int64_t>(rounds, 7)));
    std::vector<SelectionCost> found;
    try {
      found = selection_cost(selection_methods(), size, density, measured, 2 * measured);
    } catch (const std::bad_alloc&) {
      skipped("memory does not suffice");
      continue;
    }
    Table table;
    table.header = {"selector", "r += g, ms", "step, ms", "ratio", "quartiles", "lowest", "selected / k"};
    for (const SelectionCost& row : found) {
      results.add({{"selector", row.label},
                   {"size", row.size},
                   {"k", row.k},
                   {"threads", threads},
                   {"rounds", row.rounds},
                   {"warmup", row.warmup},
                   {"plain_ms", row.plain_ms},
                   {"step_ms", row.step_ms},
                   {"ratio", row.ratio},
                   {"ratio_quartile_1", row.ratio_least},
                   {"ratio_quartile_3", row.ratio_greatest},
                   {"lowest_ratio", row.lowest_ratio},
                   {"count_per_k", row.count}});
      table.rows.push_back({row.label, fmt::format("{:.3f}", row.plain_ms),
                            fmt::format("{:.3f}", row.step_ms), fmt::format("{:.2f}", row.ratio),
                            fmt::format("{:.2f} to {:.2f}", row.ratio_least, row.ratio_greatest),
                            fmt::format("{:.2f}", row.lowest_ratio), fmt::format("{:.3f}", row.count)});
      rows.push_back(row);
    }
    std::printf("\n2^%d elements, density %s, k = %zu, threads %d, medians of %d steps after %d\n%s",
                static_cast<int>(log2), short_text(density).c_str(), found.at(0).k, threads, measured,
                2 * measured, table_text(table).c_str());
    std::fflush(stdout);
    // After every size: the large ones take minutes, and a stop there keeps the others.
    write_file(out + "/selection_cost.csv", results.csv);
    write_file(out + "/selection_cost.jsonl", results.jsonl);
    write_file(out + "/selection_cost.svg", selection_cost_plot(rows));
  }
  if (rows.empty()) throw UserError("no size fits into memory; nothing was measured");
  std::printf("\nWritten: selection_cost.csv, .jsonl and .svg in %s\n", out.c_str());
}

void run_selection(const ExperimentArguments& given) {
  const SelectionArguments arguments(given);
  const std::int64_t max_log2 = arguments.max_log2;
  if (max_log2 != 0 && max_log2 < kLeastLog2)
    throw UserError(fmt::format("max_log2 of experiment selection needs 0, or 16 to 30, not '{}'",
                                given.text("max_log2")));
  if (max_log2 == 0 && arguments.in.empty())
    throw UserError(
        "experiment selection has nothing to do: give in=gradients.npy, or max_log2 of at least 16");
  const std::string out = given.folder();
  if (!arguments.in.empty()) run_quality(arguments, out);
  if (max_log2 != 0) run_cost(arguments, out);
}

const bool selection_registered = [] {
  experiments().add(
      "selection", "each selector: selected count and captured energy on recorded gradients; cost over sizes",
      {{{"in", "", "recorded gradients, .npy of [steps, elements], for count and energy; none: cost alone"},
        {"densities", "0.1,0.01,0.001,0.0001", "of the recorded gradients"},
        {"skip", "20", "recorded steps that fill the residual before steps count"},
        {"density", "0.001", "for the cost"},
        {"max_log2", "28", "cost at 2^16, 2^18, ... up to this many elements; 0: no cost"},
        {"rounds", "41", "measured steps up to 2^22 elements; fewer beyond, at least 7"},
        {"threads", "0", "of the cost; 0: as many as OpenMP takes"},
        {"out", "studies/selection", "folder of the .csv, .jsonl and .svg files"}},
       run_selection});
  return true;
}();

}  // namespace
}  // namespace topknot
