// The page of a prediction: one file, no network, no script.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/core/base/text.h"
#include "tools/common/chart.h"
#include "tools/predict/predict_report.h"

namespace topknot {
namespace {

constexpr const char* kStyle = R"(
body { margin: 0; background: #fff; color: #1c2126; font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 36px 28px 60px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; }
h2 { font-size: 19px; margin: 36px 0 6px; padding-top: 12px; border-top: 1px solid #d9dde1; }
h3 { font-size: 15px; margin: 18px 0 2px; }
p, li { max-width: 100ch; }
.modelled { border-left: 4px solid #e69f00; background: #fdf6e7; padding: 8px 14px; font-size: 14px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: 10px 0 6px; }
th, td { padding: 4px 9px; text-align: right; border-bottom: 1px solid #e4e7ea; white-space: nowrap; }
th { font-weight: 600; border-bottom: 1.5px solid #8a939b; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 2px; }
svg { display: block; width: 100%; height: auto; }
@page { size: A4 landscape; margin: 12mm; }
)";

constexpr std::size_t kPanelsInARow = 3;

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

// A plot's ids are its own only where it stands by itself.
std::string own_ids(std::string svg, const std::string& prefix) {
  for (const std::string before : {"id=\"", "url(#"})
    for (std::size_t at = 0; (at = svg.find(before + "panel", at)) != std::string::npos;) {
      at += before.size();
      svg.insert(at, prefix);
    }
  return svg;
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
  scale.ticks = linear_ticks(0, 1, 5, Unit::percent);
  return scale;
}

// A panel per network, `figure` against ranks, with a dotted line for linear scaling.
std::string charts(const PredictReport& report, double Prediction::*figure, const Scale& y,
                   const std::vector<Point>& linear) {
  const auto networks = networks_of(report);
  std::vector<std::string> names;  // a colour each, the same in all panels
  for (const auto& network : networks)
    for (const auto& curve : curves_of(report, network))
      if (std::find(names.begin(), names.end(), curve.name) == names.end()) names.push_back(curve.name);
  std::vector<std::pair<std::string, std::string>> legend;
  for (std::size_t i = 0; i < names.size(); ++i) legend.emplace_back(names[i], line_colour(i));
  legend.emplace_back("dotted: linear", "#9aa3ab");
  std::string html;
  const std::size_t row = networks.size() == 4 ? 2 : kPanelsInARow;
  for (std::size_t from = 0; from < networks.size(); from += row) {
    std::vector<Panel> panels;
    for (std::size_t n = from; n < std::min(networks.size(), from + row); ++n) {
      Panel panel;
      panel.x = binary_scale(1, most_ranks(report) * 1.08, "ranks (" + network_title(networks[n]) + ")");
      panel.y = y;
      Line ideal;
      ideal.points = linear;
      ideal.colour = "#9aa3ab", ideal.width = 1, ideal.dash = "2 3", ideal.title = "linear";
      panel.lines.push_back(ideal);
      for (const auto& curve : curves_of(report, networks[n])) {
        const auto place = std::find(names.begin(), names.end(), curve.name) - names.begin();
        Line line;
        for (const Prediction* p : curve.points)
          line.points.push_back({static_cast<double>(p->ranks), p->*figure});
        line.colour = line_colour(static_cast<std::size_t>(place));
        line.dots = true;
        line.title = curve.name + " (modelled)";
        panel.lines.push_back(line);
      }
      panels.push_back(panel);
    }
    html += own_ids(stand_alone_plot(panels, legend, y.label + " against ranks"),
                    fmt::format("{}{}-", y.logarithmic ? "speed" : "efficiency", from));
  }
  return html;
}

}  // namespace

std::string prediction_html(const PredictReport& report) {
  const auto networks = networks_of(report);
  const double most = most_ranks(report);
  std::string html =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<title>Topknot: modelled scaling</title><style>" +
      std::string(kStyle) + "</style></head><body><main>\n<h1>Modelled scaling</h1>";
  html += "<p class=\"modelled\">Every figure here is <b>modelled</b> from measured profiles";
  html += report.judgements.empty() ? ".</p>" : ", but for the columns named measured.</p>";
  html += "<ul>";
  for (const auto& line : report.sources) html += "<li>" + escape(line) + "</li>";
  html += "</ul>\n<h2>Speed-up over one rank, modelled</h2>" +
          charts(report, &Prediction::speed_up, speed_up_scale(report), {{1, 1}, {most, most}}) +
          "<h2>Scaling efficiency, modelled</h2>" +
          charts(report, &Prediction::efficiency, efficiency_scale(), {{1, 1}, {most, 1}});
  if (!report.judgements.empty())
    html += "<h2>The model against measured runs</h2><p>Milliseconds per step, medians.</p>" +
            table_html(judgement_table(report));
  for (const auto& network : networks)
    html += "<h2>" + escape(network_title(network)) + "</h2><h3>Modelled speed-up (scaling efficiency)</h3>" +
            table_html(speed_up_table(report, network)) + "<h3>Modelled iteration time, milliseconds</h3>" +
            table_html(iteration_table(report, network));
  html += "<h2>What the model assumes</h2><ul>";
  for (const auto& line : report.assumptions) html += "<li>" + escape(line) + ".</li>";
  return html + "</ul></main></body></html>\n";
}

}  // namespace topknot
