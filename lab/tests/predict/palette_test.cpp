#include "lab/predict/chart.h"

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "lab/predict/page.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

double contrast(const std::string& a, const std::string& b) {
  const double ratio = (luminance(a) + 0.05) / (luminance(b) + 0.05);
  return std::max(ratio, 1 / ratio);
}

// "#rrggbb" of the page's variables, in the light and the dark scheme.
std::vector<std::map<std::string, std::string>> schemes() {
  const std::string page = html_page("t", "");
  const auto dark = page.find("(prefers-color-scheme: dark)"), end = page.find("* {");
  REQUIRE(dark < end);
  std::vector<std::map<std::string, std::string>> result;
  for (const std::string& text : {page.substr(0, dark), page.substr(dark, end - dark)}) {
    static const std::regex variable("--([a-z]+): (#[0-9a-f]+)");
    std::map<std::string, std::string> colours;
    for (std::sregex_iterator it(text.begin(), text.end(), variable), none; it != none; ++it)
      colours[(*it)[1]] = (*it)[2] == "#fff" ? "#ffffff" : (*it)[2].str();
    result.push_back(colours);
  }
  return result;
}

}  // namespace

TEST_CASE("every registered method has a colour of its own, and one that is not listed has always the same") {
  std::set<std::string> colours;
  const auto names = compressors().names();
  for (const std::string& name : names) colours.insert(method_colour(name));
  CHECK(colours.size() == names.size());
  CHECK(method_colour("of_my_own") == "#1870f8");
  for (int i = 0; i < 100; ++i)  // the colours for these belong to no registered method
    CHECK(colours.count(method_colour("method" + std::to_string(i))) == 0);
  CHECK(!error_text([] { part_colour("no part"); }).empty());
}

TEST_CASE("areas of one method differ by shade, and text can be read on all of them") {
  const auto colours = area_colours({"dense", "topk", "topk", "topk", "topk", "topk", "dense"});
  CHECK(colours[0] == method_colour("dense"));
  CHECK(colours[1] == method_colour("topk"));
  CHECK(std::set<std::string>(colours.begin(), colours.end()).size() == colours.size());
  for (const std::string& colour : colours) CHECK(contrast(ink_on(colour), colour) >= 4);
}

TEST_CASE("lines and text are readable on a light and on a dark page") {
  CHECK(contrast("#000000", "#ffffff") == Approx(21));
  for (const auto& scheme : schemes()) {
    const std::string& paper = scheme.at("paper");
    for (const char* text : {"ink", "text", "faint"}) {
      INFO(text << " on " << paper);
      CHECK(contrast(scheme.at(text), paper) >= 4.5);
      CHECK(contrast(scheme.at(text), scheme.at("warn")) >= 4.5);
    }
    for (const std::string& name : compressors().names()) {
      INFO(name << " on " << paper);
      CHECK(contrast(method_colour(name), paper) >= 3);
    }
  }
}

TEST_CASE("the lines of one method share its colour and differ by dashes, one for each plan") {
  const auto styles = line_styles({{"dense", "buckets"},
                                   {"topk", "all"},
                                   {"dgc", "all"},
                                   {"topk", "wfbp"},
                                   {"topk", "all"},
                                   {"dgc", "wfbp"}});
  CHECK(styles[0].dash == "");
  CHECK(styles[0].colour == method_colour("dense"));
  for (const std::size_t i : {1u, 3u, 4u}) CHECK(styles[i].colour == method_colour("topk"));
  CHECK(styles[1].dash == "");
  CHECK(styles[3].dash != styles[1].dash);
  CHECK(styles[4].dash != styles[1].dash);
  CHECK(styles[4].dash != styles[3].dash);
  CHECK(styles[2].dash == styles[1].dash);  // a plan looks the same under each method
  CHECK(styles[5].dash == styles[3].dash);

  std::set<std::string> seen;
  for (const auto& style : line_styles(std::vector<PlannedMethod>(30, {"topk", "all"})))
    CHECK(seen.insert(style.colour + style.dash).second);
}

}  // namespace topknot
