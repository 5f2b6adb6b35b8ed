#include "tools/common/study_plot.h"

#include <array>

#include "nn/core/base/check.h"

namespace topknot {
namespace {

constexpr int kWidth = 1140, kRowHeight = 292, kLegendHeight = 34, kLegendLine = 20;

// The classes that panel_row() uses, as the report's page has them.
constexpr const char* kStyle =
    "<style>svg{fill:#3b434a;font-family:system-ui,sans-serif}text{font-size:12.5px}"
    ".label{font-size:13px;fill:#1c2126}.note{font-size:12px;fill:#59626b}"
    ".grid{stroke:#e4e7ea;stroke-width:1}.axis{stroke:#59626b;stroke-width:1}"
    ".reference{stroke:#1c2126;stroke-width:1;stroke-dasharray:1.5 3}</style>";

}  // namespace

std::string study_plot(const std::vector<Panel>& panels,
                       const std::vector<std::pair<std::string, std::string>>& legend,
                       const std::string& description, int label_room) {
  const auto at = [](double value) { return std::to_string(static_cast<int>(value)); };
  std::string entries;
  const double left = 78 + label_room, right = kWidth + label_room;
  double x = left, y = 18;
  for (const auto& [name, colour] : legend) {
    const double length = 31 + 7.2 * static_cast<double>(name.size());
    if (x > left && x + length > right) x = left, y += kLegendLine;
    entries += "<path stroke=\"" + colour + "\" stroke-width=\"3\" d=\"M" + at(x) + " " + at(y) +
               "h24\"/><text x=\"" + at(x + 31) + "\" y=\"" + at(y + 4) + "\">" + escape(name) + "</text>";
    x += length + 24;
  }
  const int top = kLegendHeight + static_cast<int>(y) - 18;
  const std::string height = std::to_string(kRowHeight + top), width = at(right);
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + width + " " + height +
                    "\" width=\"" + width + "\" height=\"" + height + "\">" + kStyle + "<rect width=\"" +
                    width + "\" height=\"" + height + "\" fill=\"#fff\"/>\n" + entries;
  std::string row = panel_row(panels, "panel", description);
  const std::string open = "<svg ";
  TOPKNOT_CHECK(row.starts_with(open), "a row of panels is an svg element");
  row.insert(open.size(), (label_room > 0 ? "x=\"" + at(label_room) + "\" overflow=\"visible\" " : "") +
                              "y=\"" + at(top) + "\" width=\"" + std::to_string(kWidth) + "\" height=\"" +
                              std::to_string(kRowHeight) + "\" ");
  return svg + "\n" + row + "</svg>\n";
}

std::string study_colour(std::size_t i) {
  static const std::array<const char*, 13> hues = {"#4a4a4a", "#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                   "#e69f00", "#56b4e9", "#7a3e00", "#6a3d9a", "#8a8a00",
                                                   "#c00040", "#00a0a0", "#a0a0a0"};
  return hues[i % hues.size()];
}

}  // namespace topknot
