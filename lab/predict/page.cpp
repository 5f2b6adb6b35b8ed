#include "lab/predict/page.h"

#include <fmt/format.h>

#include <page_style.h>  // generated
#include <algorithm>
#include <numeric>

#include "lab/predict/chart.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// What compare's page does not have; kCompareStyle is python/topknot/compare/page.css.
constexpr const char* kPageStyle = R"(
main { max-width: 1200px; }
.swatch { width: 28px; fill: none; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 10px 4px; }
.panels.lone { max-width: 620px; }
.panels svg { display: block; width: 100%; height: auto; fill: var(--text); }
svg text { font-size: 12.5px; }
svg .label { font-size: 13px; fill: var(--ink); }
svg .note { font-size: 12px; fill: var(--faint); }
svg .paper { fill: var(--paper); }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .reference { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 1.5 3; }
.strip { fill: currentColor; fill-opacity: 0; }
.strip:hover { fill-opacity: 0.08; }
@media print {
  main { max-width: none; }
  .panels { grid-template-columns: repeat(auto-fit, minmax(30%, 1fr)); }
}
)";

std::string milliseconds(double seconds) {
  return seconds < 0.00995 ? fmt::format("{:.2f}", 1000 * seconds) : fmt::format("{:.1f}", 1000 * seconds);
}

std::string hatched() {
  const std::string colour = part_colour("exposed communication");
  return fmt::format("background:repeating-linear-gradient(45deg,#fff 0 2px,{0} 2px 4px);border-color:{0}",
                     colour);
}

// Columns on a terminal: code points, which is right for the few signs used here.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

std::string html_page(const std::string& title, const std::string& body) {
  return "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>" +
         escape(title) + "</title><style>" + kCompareStyle + kPageStyle + "</style></head><body><main>\n" +
         body + "</main></body></html>\n";
}

std::string csv_quoted(const std::string& text) {
  std::string result = "\"";
  for (const char sign : text) result += sign == '"' ? "\"\"" : std::string(1, sign);
  return result + "\"";
}

std::string table_text(const Table& cells) {
  Table table = cells;  // a cell is one line
  for (std::string& cell : table.header) cell = one_line(cell);
  for (auto& row : table.rows)
    for (std::string& cell : row) cell = one_line(cell);
  std::vector<std::size_t> widths(table.header.size(), 0);
  const auto measure = [&](const std::vector<std::string>& row) {
    for (std::size_t i = 0; i < row.size() && i < widths.size(); ++i)
      widths[i] = std::max(widths[i], width(row[i]));
  };
  measure(table.header);
  for (const auto& row : table.rows) measure(row);
  std::string text;
  const auto line = [&](const std::vector<std::string>& row) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - width(row[i]), ' ');
      text += (i ? "  " : "") + (i == 0 ? row[i] + pad : pad + row[i]);
    }
    while (text.back() == ' ') text.pop_back();
    text += "\n";
  };
  line(table.header);
  text += std::string(std::accumulate(widths.begin(), widths.end(), 2 * (widths.size() - 1)), '-') + "\n";
  for (const auto& row : table.rows) line(row);
  return text;
}

std::string table_html(const Table& table, const char* cls,
                       const std::function<std::string(std::size_t row)>& mark) {
  std::string html =
      R"(<div class="scroll"><table)" + (cls ? fmt::format(R"( class="{}")", cls) : "") + "><thead><tr>";
  for (const auto& cell : table.header) html += "<th>" + escape(cell) + "</th>";
  html += "</tr></thead><tbody>";
  for (std::size_t r = 0; r < table.rows.size(); ++r) {
    html += "<tr>";
    for (std::size_t i = 0; i < table.rows[r].size(); ++i)
      html += "<td>" + (mark && i == 0 ? mark(r) : "") + escape(table.rows[r][i]) + "</td>";
    html += "</tr>";
  }
  return html + "</tbody></table></div>\n";
}

std::string bars_html(const std::vector<Bar>& bars) {
  double longest = 0;
  for (const Bar& bar : bars) longest = std::max({longest, bar.total, bar.hidden});
  if (!(longest > 0)) return "";
  const auto width = [&](double seconds) { return fmt::format("width:{:.2f}%", 100 * seconds / longest); };
  std::string html = "<div class=\"bars\">";
  for (const Bar& bar : bars) {
    html += "<b>" + bar.mark + escape(bar.name) + "</b><div class=\"bar\">";
    for (const BarPart& part : bar.parts)
      if (part.seconds > 0)
        html += fmt::format(R"(<i style="{};background:{};color:{}" title="{}: {} {} ms">{}</i>)",
                            width(part.seconds), part.colour, ink_on(part.colour), escape(bar.name),
                            escape(part.name), milliseconds(part.seconds), milliseconds(part.seconds));
    html += "<span>" + (bar.label.empty() ? milliseconds(bar.total) + " ms" : escape(bar.label)) +
            "</span></div>";
    if (bar.hidden > 0.002 * longest)
      html += fmt::format(
          R"(<div class="bar hidden"><i style="{};{}" title="{}: hidden communication {} ms"></i><span>{} hidden</span></div>)",
          width(bar.hidden), hatched(), escape(bar.name), milliseconds(bar.hidden), milliseconds(bar.hidden));
  }
  return html + "</div>";
}

std::string bars_legend(const std::vector<BarPart>& parts, bool hidden) {
  std::string html = "<div class=\"legend\">";
  for (const BarPart& part : parts)
    html += fmt::format(R"(<span><i style="background:{}"></i>{}</span>)", part.colour, escape(part.name));
  if (hidden)
    html += "<span><i style=\"" + hatched() + "\"></i>hidden communication, beside the computation</span>";
  return html + "</div>";
}

}  // namespace topknot
