// Where the time of a step goes, as bars.

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tools/common/report_svg.h"
#include "tools/compare/report_charts.h"

namespace topknot {
namespace {

struct Part {
  const char* name;
  double StepTimes::*seconds;
  const char* colour;
  bool dark;  // white text on it
};

// Tol's bright set and neighbours: told apart by colour-blind readers, and neighbours differ in lightness for
// grey print.
const Part kParts[] = {
    {"data", &StepTimes::data, "#bbbbbb", false},
    {"forward", &StepTimes::forward, "#4477aa", true},
    {"backward", &StepTimes::backward, "#9ad2ee", false},
    {"encode", &StepTimes::encode, "#228833", true},
    {"exposed communication", &StepTimes::exposed, "#ee6677", false},
    {"decode", &StepTimes::decode, "#aa3377", true},
    {"update", &StepTimes::update, "#ddcc55", false},
    {"other", &StepTimes::other, "#e4e4e4", false},
};

constexpr double kWidth = 1140, kLabel = 200, kRight = 90, kRow = 56, kBar = 26, kHidden = 9;

std::string format(const char* pattern, double value) {
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, pattern, value);
  return buffer;
}

std::string rect(double x, double y, double width, double height, const std::string& fill) {
  return "<rect x=\"" + format("%.1f", x) + "\" y=\"" + format("%.1f", y) + "\" width=\"" +
         format("%.1f", width) + "\" height=\"" + format("%.1f", height) + "\" fill=\"" + fill + "\" ";
}

std::string milliseconds(double seconds) {
  return format(seconds < 0.00995 ? "%.2f" : "%.1f", 1000 * seconds);
}

}  // namespace

std::string time_bars(const Comparison& c) {
  double longest = 0;
  for (const Method& m : c.methods) longest = std::max({longest, m.times.total, m.times.hidden});
  if (!(longest > 0)) return "";
  Scale x;
  x.hi = longest;
  x.from = kLabel;
  x.to = kWidth - kRight;
  const double bottom = kRow * static_cast<double>(c.methods.size()) + 6;
  std::string svg = "<svg viewBox=\"0 0 " + format("%.0f", kWidth) + " " + format("%.0f", bottom + 48) +
                    "\" role=\"img\" aria-label=\"Parts of a step's time, by method\">"
                    "<defs><pattern id=\"hidden\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
                    "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#fff\"/>"
                    "<rect width=\"2.2\" height=\"6\" fill=\"#ee6677\"/></pattern></defs>";
  for (const Tick& tick : linear_ticks(0, 1000 * longest, 8, Unit::plain)) {
    const std::string at = format("%.1f", x(tick.value / 1000));
    svg += "<line class=\"grid\" x1=\"" + at + "\" x2=\"" + at + "\" y1=\"0\" y2=\"" +
           format("%.1f", bottom) + "\"/>" + "<text text-anchor=\"middle\" x=\"" + at + "\" y=\"" +
           format("%.1f", bottom + 17) + "\">" + tick.label + "</text>";
  }
  svg += "<text class=\"label\" text-anchor=\"middle\" x=\"" + format("%.1f", (x.from + x.to) / 2) +
         "\" y=\"" + format("%.1f", bottom + 38) + "\">milliseconds a step</text>";
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    const Method& m = c.methods[i];
    const double y = kRow * static_cast<double>(i) + 8;
    // Long names (several keys) are cut; the table below has them whole.
    const std::string name = m.name.size() > 27 ? m.name.substr(0, 26) + "…" : m.name;
    svg += "<text class=\"name\" text-anchor=\"end\" x=\"" + format("%.1f", kLabel - 12) + "\" y=\"" +
           format("%.1f", y + kBar / 2 + 4.5) + "\" fill=\"" + method_colour(c, i) + "\">" + escape(name) +
           "</text>";
    double start = 0;
    for (const Part& part : kParts) {
      const double seconds = m.times.*part.seconds;
      if (!(seconds > 0)) continue;
      const double from = x(start), width = x(start + seconds) - from;
      start += seconds;
      svg += rect(from, y, width, kBar, part.colour) + "stroke=\"#fff\" stroke-width=\"" +
             (width > 3 ? "0.8" : "0") + "\"><title>" + escape(m.name) + ": " + part.name + " " +
             milliseconds(seconds) + " ms</title></rect>";
      if (width > 34)
        svg += "<text text-anchor=\"middle\" x=\"" + format("%.1f", from + width / 2) + "\" y=\"" +
               format("%.1f", y + kBar / 2 + 4) + "\"" + (part.dark ? " fill=\"#fff\"" : " fill=\"#222\"") +
               ">" + milliseconds(seconds) + "</text>";
    }
    svg += "<text class=\"label\" x=\"" + format("%.1f", x(start) + 8) + "\" y=\"" +
           format("%.1f", y + kBar / 2 + 4) + "\">" + milliseconds(m.times.total) + " ms</text>";
    if (m.times.hidden > 0.002 * longest) {
      svg += rect(x(0), y + kBar + 2, x(m.times.hidden) - x(0), kHidden, "url(#hidden)") +
             "stroke=\"#ee6677\" stroke-width=\"0.8\"><title>" + escape(m.name) + ": hidden communication " +
             milliseconds(m.times.hidden) + " ms</title></rect><text class=\"note\" x=\"" +
             format("%.1f", x(m.times.hidden) + 6) + "\" y=\"" + format("%.1f", y + kBar + kHidden + 2.5) +
             "\">" + milliseconds(m.times.hidden) + " hidden</text>";
    }
  }
  return svg + "</svg>";
}

std::string time_bars_legend() {
  std::string html;
  for (const Part& part : kParts)
    html += std::string("<span><i class=\"box\" style=\"background:") + part.colour + "\"></i>" + part.name +
            "</span>";
  return html +
         "<span><i class=\"box\" style=\"background:repeating-linear-gradient(45deg,#fff 0 2px,#ee6677 2px "
         "4px)\"></i>"
         "hidden communication, beside the computation</span>";
}

}  // namespace topknot
