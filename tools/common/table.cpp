#include "tools/common/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "nn/base/text.h"
#include "tools/common/chart.h"

namespace topknot {
namespace {

// Columns on a terminal: code points, which is right for the few signs used here.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

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

}  // namespace topknot
