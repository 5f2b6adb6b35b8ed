#include <algorithm>
#include <cmath>

#include "nn/core/base/text.h"
#include "tools/study/study_selection.h"

namespace topknot {
namespace {

template <class Row>
std::vector<std::string> labels_of(const std::vector<Row>& rows) {
  std::vector<std::string> labels;
  for (const Row& row : rows)
    if (std::find(labels.begin(), labels.end(), row.label) == labels.end()) labels.push_back(row.label);
  return labels;
}

constexpr int kLabelRoom = 80;

// A panel a density with a row a method: a ring at `middle`, a line from `lo` to `hi` of the method.
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
    panel.y.lo = -0.6;
    panel.y.hi = n - 0.4;
    for (std::size_t i = 0; i < labels.size(); ++i)
      panel.y.ticks.push_back({n - 1 - static_cast<double>(i), labels[i]});
    panel.lines.push_back({{{1, panel.y.lo}, {1, panel.y.hi}}, "#1c2126", 1, 1, "1.5 3", false, false, ""});
    for (const SelectionQuality& row : rows) {
      if (row.density != density || !std::isfinite(middle(row))) continue;
      const auto place = std::find(labels.begin(), labels.end(), row.label) - labels.begin();
      const double y = n - 1 - static_cast<double>(place);
      const auto inside = [&](double value) { return std::clamp(value, x.lo, x.hi); };
      const auto [lo, hi] = ends(row);
      Line line;
      line.points = {{inside(lo), y}, {inside(hi), y}};
      line.colour = study_colour(1);
      line.title = row.label + ": " + short_text(middle(row));
      panel.lines.push_back(line);
      panel.marks.push_back({{inside(middle(row)), y}, study_colour(1)});
    }
    panels.push_back(panel);
  }
  return study_plot(panels, {{legend, study_colour(1)}}, description, kLabelRoom);
}

}  // namespace

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

std::string selection_cost_plot(const std::vector<SelectionCost>& rows) {
  Panel panel;
  std::vector<std::pair<std::string, std::string>> legend;
  const std::vector<std::string> labels = labels_of(rows);
  double lo = 1, hi = 2, first = 64, last = 0;
  for (std::size_t m = 0; m < labels.size(); ++m) {
    Line line;
    for (const SelectionCost& row : rows) {
      if (row.label != labels[m]) continue;
      const double size = std::log2(static_cast<double>(row.size));
      line.points.push_back({size, row.ratio});
      lo = std::min(lo, row.ratio);
      hi = std::max(hi, row.ratio);
      first = std::min(first, size);
      last = std::max(last, size);
    }
    line.colour = study_colour(m);
    line.dots = true;
    line.title = labels[m];
    legend.emplace_back(labels[m], line.colour);
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
  return study_plot({panel}, legend, "Time of selection relative to a plain pass over the size");
}

}  // namespace topknot
