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
};

const Part kParts[] = {
    {"data", &StepTimes::data},
    {"forward", &StepTimes::forward},
    {"backward", &StepTimes::backward},
    {"encode", &StepTimes::encode},
    {"exposed communication", &StepTimes::exposed},
    {"decode", &StepTimes::decode},
    {"update", &StepTimes::update},
    {"other", &StepTimes::other},
};

std::string milliseconds(double seconds) {
  return seconds < 0.00995 ? fmt::format("{:.2f}", 1000 * seconds) : fmt::format("{:.1f}", 1000 * seconds);
}

std::string hatched() {
  const std::string colour = part_colour("exposed communication");
  return fmt::format("background:repeating-linear-gradient(45deg,#fff 0 2px,{0} 2px 4px);border-color:{0}",
                     colour);
}

}  // namespace

std::string time_bars(const Comparison& c) {
  double longest = 0;
  for (const Method& m : c.methods) longest = std::max({longest, m.times.total, m.times.hidden});
  if (!(longest > 0)) return "";
  const auto width = [&](double seconds) { return fmt::format("width:{:.2f}%", 100 * seconds / longest); };
  std::string html = "<div class=\"bars\">";
  for (const Method& m : c.methods) {
    html += "<b>" + escape(m.name) + "</b><div class=\"bar\">";
    for (const Part& part : kParts) {
      const double seconds = m.times.*part.seconds;
      if (!(seconds > 0)) continue;
      const std::string colour = part_colour(part.name);
      html += fmt::format(R"(<i style="{};background:{};color:{}" title="{}: {} {} ms">{}</i>)",
                          width(seconds), colour, luminance(colour) > 0.18 ? "#111" : "#fff", escape(m.name),
                          part.name, milliseconds(seconds), milliseconds(seconds));
    }
    html += fmt::format("<span>{} ms</span></div>", milliseconds(m.times.total));
    if (m.times.hidden > 0.002 * longest)
      html += fmt::format(
          R"(<div class="bar hidden"><i style="{};{}" title="{}: hidden communication {} ms"></i><span>{} hidden</span></div>)",
          width(m.times.hidden), hatched(), escape(m.name), milliseconds(m.times.hidden),
          milliseconds(m.times.hidden));
  }
  return html + "</div>";
}

std::string time_bars_legend() {
  std::string html;
  for (const Part& part : kParts)
    html += fmt::format(R"(<span><i style="background:{}"></i>{}</span>)", part_colour(part.name), part.name);
  return html + "<span><i style=\"" + hatched() +
         "\"></i>hidden communication, beside the computation</span>";
}

}  // namespace topknot
