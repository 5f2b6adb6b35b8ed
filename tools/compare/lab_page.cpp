// The page of `lab/netlab compare`, from its results.json.

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "tools/common/chart.h"
#include "tools/compare/compare.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

BarPart part_of(const Json& part) {
  return {part.at("name"), part_colour(part.at("colour_of").get<std::string>()), part.value("seconds", 0.0)};
}

std::string page_of(const Json& page) {
  std::string html =
      "<h1>" + escape(page.at("title")) + "</h1><p class=\"sub\">" + escape(page.at("note")) + "</p>\n";
  std::vector<BarPart> legend;
  for (const Json& part : page.at("legend")) legend.push_back(part_of(part));
  html += bars_legend(legend, false);
  for (const Json& group : page.at("groups")) {
    std::vector<Bar> bars;
    for (const Json& step : group.at("bars")) {
      const LineStyle style{method_colour(step.at("method").get<std::string>()), ""};
      Bar bar{.name = step.at("name"), .mark = swatch(style), .label = step.at("label")};
      if (!step.at("seconds").is_null()) bar.total = step.at("seconds");
      for (const Json& part : step.at("parts")) {
        BarPart& drawn = bar.parts.emplace_back(part_of(part));
        drawn.seconds = std::min(drawn.seconds, bar.total);
      }
      bars.push_back(std::move(bar));
    }
    const Table table{group.at("header"), group.at("rows")};
    html += "<h2>" + escape(group.at("heading")) + "</h2>" + bars_html(bars) + table_html(table);
  }
  if (!page.at("failed").empty()) {
    html += "<h2>Failed</h2><ul>";
    for (const Json& line : page.at("failed")) html += "<li>" + escape(line) + "</li>";
    html += "</ul>";
  }
  html += "<h2>Commands</h2>";
  for (const Json& method : page.at("commands"))
    html += "<p class=\"note\"><b>" + escape(method.at(0)) + "</b>: <code>" + escape(method.at(1)) +
            "</code></p>";
  return html_page(page.at("title"), html);
}

}  // namespace

std::string lab_html(const std::string& path) {
  std::ifstream in = open_stream(path);
  try {
    return page_of(Json::parse(in).at("page"));
  } catch (const std::exception& error) {
    throw UserError(path + ": not a results.json of 'lab/netlab compare': " + error.what());
  }
}

}  // namespace topknot
