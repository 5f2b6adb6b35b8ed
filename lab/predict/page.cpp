#include "lab/predict/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "lab/predict/chart.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// Text and lines have a contrast of 4.5 and more on their background in both schemes.
constexpr const char* kPageStyle = R"(
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2126; --text: #3b434a; --faint: #59626b; --rule: #d9dde1;
  --grid: #e4e7ea; --head: #8a939b; --warn: #fdf6e7; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e8ebee; --text: #c3cad1; --faint: #a3adb6;
  --rule: #353d45; --grid: #2c343b; --head: #6d7780; --warn: #2b2417; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 36px 28px 60px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 44px 0 6px; padding-top: 12px; border-top: 1px solid var(--rule); }
h3 { font-size: 15px; margin: 22px 0 2px; }
p { margin: 4px 0 10px; }
p, li { max-width: 92ch; overflow-wrap: anywhere; }
.sub { color: var(--faint); margin-bottom: 22px; }
.note { color: var(--faint); font-size: 13.5px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 165px), 1fr)); gap: 14px; margin: 18px 0 8px; }
.card { border: 1px solid var(--rule); border-top: 4px solid; border-radius: 4px; padding: 12px 14px 10px; }
.card b { display: block; font-size: 15px; overflow-wrap: anywhere; }
.card strong { display: block; font-size: 28px; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }
.card small { color: var(--faint); font-size: 13px; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: 10px 0 6px; }
th, td { padding: 5px 8px; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { font-weight: 600; color: var(--text); border-bottom: 1.5px solid var(--head); vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; padding-left: 2px; }
td:first-child { font-weight: 600; }
table.plain td { white-space: normal; overflow-wrap: anywhere; min-width: 9ch; }
table.runs { font-size: 12.5px; }
table.runs th, table.runs td { padding: 4px 7px; }
table.runs td:first-child { font-weight: 400; white-space: normal; overflow-wrap: anywhere; min-width: 16ch; }
.swatch { display: inline-block; width: 28px; height: 8px; margin-right: 7px; vertical-align: middle; fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; font-size: 13.5px; margin: 6px 0 8px; color: var(--text); }
.legend i { display: inline-block; width: 13px; height: 13px; vertical-align: -2px; margin-right: 6px; border: 1px solid #0002; }
.warning { border-left: 4px solid #e69f00; background: var(--warn); padding: 8px 14px; margin: 14px 0; font-size: 14px; }
.warning ul { margin: 2px 0; padding-left: 18px; }
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
.bars { display: grid; grid-template-columns: minmax(6ch, 22ch) 1fr; gap: 2px 12px; align-items: center; margin: 8px 0; font-size: 13px; }
.bars b { text-align: right; overflow-wrap: anywhere; line-height: 1.2; }
.bars .bar { display: flex; align-items: center; padding-right: 11ch; }
.bars .bar > i { flex: none; height: 26px; overflow: hidden; display: flex; flex-wrap: wrap; justify-content: center;
  font-style: normal; line-height: 26px; font-size: 12px; }
.bars .bar > i::before { content: ""; width: 0; height: 26px; }
.bars .bar > span { white-space: nowrap; margin: 0 -11ch 0 7px; }
.bars .hidden { grid-column: 2; font-size: 12px; color: var(--faint); margin-bottom: 8px; }
.bars .hidden > i { height: 9px; border: 1px solid; }
@media (max-width: 640px) {
  main { padding: 20px 14px 40px; }
  .bars { grid-template-columns: 1fr; }
  .bars b { text-align: left; margin-top: 6px; }
  .bars .hidden { grid-column: 1; }
  th, td { padding: 5px 8px; }
}
@media print {
  :root { color-scheme: light; --paper: #fff; --ink: #1c2126; --text: #3b434a; --faint: #59626b; --rule: #d9dde1;
    --grid: #e4e7ea; --head: #8a939b; --warn: #fdf6e7; }
  body { font-size: 11px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  h2 { margin-top: 22px; }
  h2, h3 { break-after: avoid; }
  h3 { margin-top: 10px; }
  svg, table, .card, .legend, .chart { break-inside: avoid; }
  .panels { grid-template-columns: repeat(auto-fit, minmax(30%, 1fr)); }
  .note, .legend { font-size: 10px; margin: 2px 0 4px; }
  table { font-size: 9.5px; } th, td { padding: 3px 5px; }
  table.runs { font-size: 8.5px; } table.runs th, table.runs td { padding: 2px 4px; }
  .scroll { overflow: visible; }
}
@page { size: A4 landscape; margin: 12mm; }
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
         escape(title) + "</title><style>" + kPageStyle + "</style></head><body><main>\n" + body +
         "</main></body></html>\n";
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
