// The distribution of the accumulated gradient and the contraction of top-k, drawn.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/common/chart.h"
#include "tools/compare/report_charts.h"

namespace topknot {
namespace {

constexpr const char* kNormalDash = "7 4";
constexpr const char* kLaplaceDash = "2 3";

struct Recorded {
  std::size_t method;
  const std::vector<DistributionRecord>* records;
};

std::vector<Recorded> recorded_methods(const Comparison& c) {
  std::vector<Recorded> result;
  for (std::size_t m = 0; m < c.methods.size(); ++m)
    for (const auto i : c.methods[m].runs)
      if (!c.runs[i].metrics.distributions.empty()) {
        result.push_back({m, &c.runs[i].metrics.distributions});
        break;
      }
  return result;
}

// Density of (u - mean) / deviation, bin by bin; gaps where a bin is empty.
std::vector<Point> measured(const DistributionRecord& r) {
  const double width =
      2 * kHistogramReach / static_cast<double>(std::max<std::size_t>(1, r.histogram.size()));
  std::vector<Point> points;
  for (std::size_t i = 0; i < r.histogram.size(); ++i) {
    const double x = -kHistogramReach + width * (static_cast<double>(i) + 0.5);
    const double share = static_cast<double>(r.histogram[i]) / static_cast<double>(r.size);
    points.push_back({x, r.histogram[i] > 0 ? share / width : kAbsent});
  }
  return points;
}

template <class Density>
std::vector<Point> fitted(double least, Density density) {
  std::vector<Point> points;
  for (double x = -kHistogramReach; x <= kHistogramReach; x += 0.05) {
    const double y = density(x);
    points.push_back({x, y >= least ? y : kAbsent});
  }
  return points;
}

std::string histograms(const Comparison& c, const Recorded& recorded) {
  const auto& records = *recorded.records;
  std::vector<std::size_t> chosen{0};
  for (const auto i : {records.size() / 2, records.size() - 1})
    if (i != chosen.back()) chosen.push_back(i);
  Scale y;
  y.label = "density";
  y.logarithmic = true;
  y.lo = 1e-6;
  y.hi = 2;
  for (const auto i : chosen)
    for (const Point& p : measured(records[i]))
      if (std::isfinite(p.y)) y.lo = std::min(y.lo, p.y / 2), y.hi = std::max(y.hi, p.y * 1.5);
  y.ticks = log_ticks(y.lo, y.hi, Unit::plain);
  std::vector<Panel> panels;
  for (const auto i : chosen) {
    const DistributionRecord& r = records[i];
    Panel panel;
    panel.x.lo = -kHistogramReach;
    panel.x.hi = kHistogramReach;
    panel.x.ticks = linear_ticks(-kHistogramReach, kHistogramReach, 8, Unit::plain);
    panel.x.label = fmt::format("step {}: standard deviations", r.step);
    if (std::isfinite(r.deviation)) panel.x.label += fmt::format(", of {:.3g} each", r.deviation);
    panel.y = y;
    constexpr double kRootTwoPi = 2.5066282746310002;
    const auto normal = [](double x) { return std::exp(-x * x / 2) / kRootTwoPi; };
    panel.lines.push_back({.points = fitted(y.lo, normal),
                           .colour = kInk,
                           .width = 1.4,
                           .dash = kNormalDash,
                           .title = "normal distribution of the same mean and deviation"});
    if (r.laplace_scale > 0 && r.deviation > 0) {
      const double scale = r.laplace_scale / r.deviation, middle = (r.median - r.mean) / r.deviation;
      const auto laplace = [&](double x) { return std::exp(-std::fabs(x - middle) / scale) / (2 * scale); };
      panel.lines.push_back({.points = fitted(y.lo, laplace),
                             .colour = kInk,
                             .width = 1.4,
                             .dash = kLaplaceDash,
                             .title = "fitted Laplace distribution"});
    }
    panel.lines.push_back({.points = measured(r),
                           .colour = c.styles[recorded.method].colour,
                           .dash = "",
                           .title = fmt::format("{}, step {}", c.methods[recorded.method].name, r.step)});
    panels.push_back(std::move(panel));
  }
  return panel_figure(panels, fmt::format("distribution{}-", recorded.method),
                      "Distribution of the accumulated gradient under " + c.methods[recorded.method].name);
}

template <class Get>
std::vector<Point> over_steps(const std::vector<DistributionRecord>& records, Get get) {
  std::vector<Point> points;
  for (const auto& r : records) points.push_back({static_cast<double>(r.step), get(r)});
  return points;
}

// `captured`: what the k largest entries hold of the energy, 1 - contraction, in place of the rest.
std::string contraction_chart(const Comparison& c, const std::vector<Recorded>& methods, bool captured) {
  const auto value = [captured](double rest) { return captured ? 1 - rest : rest; };
  Panel panel;
  double lo = kAbsent, hi = kAbsent, last = 1;
  for (const auto& m : methods) {
    const LineStyle& style = c.styles[m.method];
    const auto add = [&](double DistributionRecord::*member, const std::string& dash,
                         const std::string& title) {
      const bool solid = member == &DistributionRecord::contraction;
      Line line;
      line.points = over_steps(*m.records, [&](const DistributionRecord& r) { return value(r.*member); });
      line.colour = style.colour;
      line.dash = dash;
      line.dots = solid;
      line.width = solid ? 2 : 1.4;
      line.title = c.methods[m.method].name + ": " + title;
      for (const Point& p : line.points)
        if (std::isfinite(p.y) && (!captured || p.y > 0)) {
          lo = std::isnan(lo) ? p.y : std::min(lo, p.y);
          hi = std::isnan(hi) ? p.y : std::max(hi, p.y);
        }
      last = std::max(last, line.points.back().x);
      panel.lines.push_back(std::move(line));
    };
    add(&DistributionRecord::bound, kNormalDash, captured ? "k/d" : "1 - k/d");
    add(&DistributionRecord::bell_bound, kLaplaceDash, captured ? "1 - (1 - k/d)²" : "(1 - k/d)²");
    add(&DistributionRecord::contraction, style.dash, "measured");
  }
  if (std::isnan(lo)) return "";
  panel.x.hi = last;
  panel.x.label = "step";
  panel.x.ticks = linear_ticks(0, last, 10, Unit::plain);
  panel.y.label = captured ? "1 - contraction" : "contraction";
  panel.y.logarithmic = captured;
  const double pad = 0.06 * std::max(hi - lo, 1e-6);
  panel.y.lo = captured ? lo / 1.3 : std::max(0.0, lo - pad);
  panel.y.hi = captured ? hi * 1.3 : hi + pad;
  panel.y.ticks = captured ? log_ticks(panel.y.lo, panel.y.hi, Unit::plain)
                           : linear_ticks(panel.y.lo, panel.y.hi, 6, Unit::plain);
  return panel_figure({panel}, captured ? "captured" : "contraction",
                      captured ? "Share of the energy that the k largest entries hold"
                               : "Contraction of top-k by step, and its bounds");
}

}  // namespace

std::string distribution_section(const Comparison& c) {
  const auto methods = recorded_methods(c);
  if (methods.empty()) return "";
  std::string html =
      "<h2>The accumulated gradient</h2><p class=\"note\">Of rank 0, gradient and residual together, before "
      "anything is taken out of it; the compressed part of the model as one vector. First, middle and last "
      "recorded step; densities logarithmic.</p>";
  // The methods' own colours stand in the legend of the page.
  html += legend_html({{"fitted normal distribution; 1 - k/d", {kInk, kNormalDash}},
                       {"fitted Laplace distribution; (1 - k/d)²", {kInk, kLaplaceDash}}},
                      {"thick, in the method's colour: measured"});
  for (const auto& m : methods)
    html += "<div class=\"chart\"><h3>" + escape(c.methods[m.method].name) + "</h3>" + histograms(c, m) +
            "</div>\n";
  html +=
      "<div class=\"chart\"><h3>Contraction of top-k</h3><p class=\"note\">What is left of ‖u‖² without its "
      "k largest entries. 1 - k/d bounds it for every u; (1 - k/d)² for bell-shaped u.</p>" +
      contraction_chart(c, methods, false) + "</div>\n";
  html +=
      "<div class=\"chart\"><h3>Captured energy</h3><p class=\"note\">The same as the share of ‖u‖² that the "
      "k largest entries hold, 1 - contraction; logarithmic, and the bounds are lower bounds here.</p>" +
      contraction_chart(c, methods, true) + "</div>\n";
  return html;
}

}  // namespace topknot
