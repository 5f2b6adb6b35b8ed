// The parts of a step's time, as bars.

#include <fmt/format.h>

#include <algorithm>

#include "tools/common/chart.h"
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

std::string rect(double x, double y, double width, double height, const std::string& fill) {
  return fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}" )", x, y, width,
                     height, fill);
}

std::string milliseconds(double seconds) {
  return seconds < 0.00995 ? fmt::format("{:.2f}", 1000 * seconds) : fmt::format("{:.1f}", 1000 * seconds);
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
  std::string svg =
      fmt::format(
          R"(<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="Parts of a step's time, by method">)",
          kWidth, bottom + 48) +
      R"(<defs><pattern id="hidden" width="6" height="6" patternUnits="userSpaceOnUse" )"
      R"x(patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/>)x"
      R"(<rect width="2.2" height="6" fill="#ee6677"/></pattern></defs>)";
  for (const Tick& tick : linear_ticks(0, 1000 * longest, 8, Unit::plain))
    svg += fmt::format(R"(<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="0" y2="{1:.1f}"/>)"
                       R"(<text text-anchor="middle" x="{0:.1f}" y="{2:.1f}">{3}</text>)",
                       x(tick.value / 1000), bottom, bottom + 17, tick.label);
  svg += fmt::format(
      R"(<text class="label" text-anchor="middle" x="{:.1f}" y="{:.1f}">milliseconds per step</text>)",
      (x.from + x.to) / 2, bottom + 38);
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    const Method& m = c.methods[i];
    const double y = kRow * static_cast<double>(i) + 8;
    // Long names (several keys) are cut; the table below has them whole.
    const std::string name = m.name.size() > 27 ? m.name.substr(0, 26) + "…" : m.name;
    svg += fmt::format(R"(<text class="name" text-anchor="end" x="{:.1f}" y="{:.1f}" fill="{}">{}</text>)",
                       kLabel - 12, y + kBar / 2 + 4.5, method_colour(c, i), escape(name));
    double start = 0;
    for (const Part& part : kParts) {
      const double seconds = m.times.*part.seconds;
      if (!(seconds > 0)) continue;
      const double from = x(start), width = x(start + seconds) - from;
      start += seconds;
      svg += rect(from, y, width, kBar, part.colour) +
             fmt::format(R"(stroke="#fff" stroke-width="{}"><title>{}: {} {} ms</title></rect>)",
                         width > 3 ? "0.8" : "0", escape(m.name), part.name, milliseconds(seconds));
      if (width > 34)
        svg += fmt::format(R"(<text text-anchor="middle" x="{:.1f}" y="{:.1f}" fill="{}">{}</text>)",
                           from + width / 2, y + kBar / 2 + 4, part.dark ? "#fff" : "#222",
                           milliseconds(seconds));
    }
    svg += fmt::format(R"(<text class="label" x="{:.1f}" y="{:.1f}">{} ms</text>)", x(start) + 8,
                       y + kBar / 2 + 4, milliseconds(m.times.total));
    if (m.times.hidden > 0.002 * longest)
      svg +=
          rect(x(0), y + kBar + 2, x(m.times.hidden) - x(0), kHidden, "url(#hidden)") +
          fmt::format(
              R"(stroke="#ee6677" stroke-width="0.8"><title>{0}: hidden communication {1} ms</title></rect>)"
              R"(<text class="note" x="{2:.1f}" y="{3:.1f}">{1} hidden</text>)",
              escape(m.name), milliseconds(m.times.hidden), x(m.times.hidden) + 6, y + kBar + kHidden + 2.5);
  }
  return svg + "</svg>";
}

std::string time_bars_legend() {
  std::string html;
  for (const Part& part : kParts)
    html +=
        fmt::format(R"(<span><i class="box" style="background:{}"></i>{}</span>)", part.colour, part.name);
  return html +
         "<span><i class=\"box\" style=\"background:repeating-linear-gradient(45deg,#fff 0 2px,#ee6677 2px "
         "4px)\"></i>"
         "hidden communication, beside the computation</span>";
}

}  // namespace topknot
