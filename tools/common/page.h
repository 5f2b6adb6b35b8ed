#pragma once
// Pages and tables. A page is one file, no network, no script: it follows the reader's light or dark scheme, stacks its
// figures where it is narrow, and prints on A4. A table is for the terminal and for a page; cells are plain text (UTF-8).

#include <functional>
#include <string>
#include <vector>

namespace topknot {

// `title` as plain text, `body` as HTML.
std::string html_page(const std::string& title, const std::string& body);

struct Table {
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
};

std::string table_text(const Table& table);  // aligned, for a terminal
// `cls`: a CSS class, null for none; `mark`: HTML before the first cell of a row.
std::string table_html(const Table& table, const char* cls = nullptr,
                       const std::function<std::string(std::size_t row)>& mark = {});

}  // namespace topknot
