#pragma once
// Pages and tables. A page is one file, no network, no script: it follows the reader's light or dark scheme,
// stacks its figures where it is narrow, and prints on A4. A table is for the terminal and for a page; cells
// are plain text (UTF-8).

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

std::string table_text(const Table& table);       // aligned, for a terminal
std::string csv_quoted(const std::string& text);  // a field of any text
// `cls`: a CSS class, null for none; `mark`: HTML before the first cell of a row.
std::string table_html(const Table& table, const char* cls = nullptr,
                       const std::function<std::string(std::size_t row)>& mark = {});

// A part of a step's time.
struct BarPart {
  std::string name, colour;  // "#rrggbb"
  double seconds = 0;        // not drawn where it is not above 0
};

// A step: its parts one after the other, each with its milliseconds.
struct Bar {
  std::string name;
  std::string mark = {};  // HTML before the name
  std::vector<BarPart> parts = {};
  double total = 0;        // seconds
  std::string label = {};  // after the parts; "": the total in milliseconds
  double hidden = 0;       // seconds of communication during the computation: a narrow bar below
};

// The bars on one scale, as HTML; "" if all are empty.
std::string bars_html(const std::vector<Bar>& bars);
// The names of the parts; with `hidden` that of the narrow bar too.
std::string bars_legend(const std::vector<BarPart>& parts, bool hidden);

}  // namespace topknot
