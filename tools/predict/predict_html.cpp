// The page of a prediction.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/base/text.h"
#include "tools/common/chart.h"
#include "tools/common/page.h"
#include "tools/predict/predict_report.h"

namespace topknot {
namespace {

// Powers of two, every second or fourth where there are many.
Scale binary_scale(double lo, double hi, const std::string& label) {
  Scale scale;
  scale.logarithmic = true;
  scale.lo = lo;
  scale.hi = hi;
  scale.label = label;
  const double first = std::floor(std::log2(lo) + 1e-9), last = std::log2(hi);
  const double stride = last - first > 12 ? 4 : last - first > 6 ? 2 : 1;
  for (double e = std::max(first, -20.0); e <= last + 1e-9; e += stride)
    if (std::exp2(e) >= lo * 0.999) scale.ticks.push_back({std::exp2(e), short_text(std::exp2(e))});
  return scale;
}

double most_ranks(const PredictReport& report) {
  double most = 2;
  for (const Prediction& p : report.predictions) most = std::max(most, static_cast<double>(p.ranks));
  return most;
}

Scale speed_up_scale(const PredictReport& report) {
  double least = 1;
  for (const Prediction& p : report.predictions) least = std::min(least, p.speed_up);
  return binary_scale(least * 0.93, most_ranks(report) * 1.15, "modelled speed-up");
}

Scale efficiency_scale() {
  Scale scale;
  scale.lo = 0, scale.hi = 1.03, scale.label = "modelled efficiency";
  scale.ticks = linear_ticks(0, 1, 5, Unit::percent), scale.unit = Unit::percent;
  return scale;
}

// The curves of all networks, by name: one style each, the same in all panels.
std::vector<LegendEntry> legend_of(const PredictReport& report) {
  std::vector<LegendEntry> legend;
  std::vector<PlannedMethod> lines;
  for (const auto& network : networks_of(report))
    for (const auto& curve : curves_of(report, network)) {
      if (std::any_of(legend.begin(), legend.end(),
                      [&](const auto& known) { return known.name == curve.name; }))
        continue;
      legend.push_back({curve.name, {}});
      lines.push_back({curve.points.front()->method, curve.points.front()->merge});
    }
  const std::vector<LineStyle> styles = line_styles(lines);
  for (std::size_t i = 0; i < legend.size(); ++i) legend[i].style = styles[i];
  return legend;
}

const LineStyle& style_of(const std::vector<LegendEntry>& legend, const std::string& name) {
  return std::find_if(legend.begin(), legend.end(), [&](const auto& known) { return known.name == name; })
      ->style;
}

const LineStyle kLinear{kInk, "1.5 4"};

// A panel per network, `figure` against ranks, with a dotted line for linear scaling.
std::string charts(const PredictReport& report, const std::vector<LegendEntry>& legend,
                   double Prediction::*figure, const Scale& y, const std::vector<Point>& linear) {
  std::vector<Panel> panels;
  for (const auto& network : networks_of(report)) {
    Panel panel;
    panel.x = binary_scale(1, most_ranks(report) * 1.08, "ranks\n" + network_title(network));
    panel.y = y;
    panel.lines.push_back({.points = linear,
                           .colour = kLinear.colour,
                           .width = 1,
                           .opacity = 0.6,
                           .dash = kLinear.dash,
                           .title = ""});
    for (const auto& curve : curves_of(report, network)) {
      Line line;
      for (const Prediction* p : curve.points)
        line.points.push_back({static_cast<double>(p->ranks), p->*figure});
      const LineStyle& style = style_of(legend, curve.name);
      line.colour = style.colour;
      line.dash = style.dash;
      line.dots = true;
      line.title = curve.name + " (modelled)";
      panel.lines.push_back(line);
    }
    panels.push_back(panel);
  }
  return panel_figure(panels, y.logarithmic ? "speed" : "efficiency", y.label + " against ranks");
}

}  // namespace

std::string prediction_html(const PredictReport& report) {
  const auto networks = networks_of(report);
  const double most = most_ranks(report);
  std::vector<LegendEntry> legend = legend_of(report);
  const std::vector<LegendEntry> curves = legend;
  legend.push_back({"linear", kLinear});
  std::string html =
      "<h1>Modelled scaling</h1><p class=\"warning\">Every figure here is <b>modelled</b> from measured "
      "profiles";
  html += report.judgements.empty() ? ".</p>" : ", but for the columns named measured.</p>";
  html += "<ul>";
  for (const auto& line : report.sources) html += "<li>" + escape(line) + "</li>";
  html += "</ul>\n<h2>Speed-up over one rank, modelled</h2>" + legend_html(legend) +
          charts(report, curves, &Prediction::speed_up, speed_up_scale(report), {{1, 1}, {most, most}}) +
          "<h2>Scaling efficiency, modelled</h2>" +
          charts(report, curves, &Prediction::efficiency, efficiency_scale(), {{1, 1}, {most, 1}});
  if (!report.judgements.empty())
    html += "<h2>The model against measured runs</h2><p>Milliseconds per step, medians.</p>" +
            table_html(judgement_table(report));
  for (const auto& network : networks) {
    const auto rows = curves_of(report, network);
    const auto mark = [&](std::size_t row) { return swatch(style_of(curves, rows[row].name)); };
    html += "<h2>" + escape(network_title(network)) + "</h2><h3>Modelled speed-up (scaling efficiency)</h3>" +
            table_html(speed_up_table(report, network), nullptr, mark) +
            "<h3>Modelled iteration time, milliseconds</h3>" +
            table_html(iteration_table(report, network), nullptr, mark);
  }
  html += "<h2>What the model assumes</h2><ul>";
  for (const auto& line : report.assumptions) html += "<li>" + escape(line) + ".</li>";
  return html_page("Topknot: modelled scaling", html + "</ul>");
}

}  // namespace topknot
