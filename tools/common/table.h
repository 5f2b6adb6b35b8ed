#pragma once
// A table for the terminal and for a page. Cells are plain text (UTF-8).

#include <functional>
#include <string>
#include <vector>

namespace topknot {

struct Table {
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
};

std::string table_text(const Table& table);  // aligned, for a terminal
// `cls`: a CSS class, null for none; `mark`: HTML before the first cell of a row.
std::string table_html(const Table& table, const char* cls = nullptr,
                       const std::function<std::string(std::size_t row)>& mark = {});

}  // namespace topknot
