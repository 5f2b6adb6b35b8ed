#include "lab/predict/predict_auto.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>

#include "lab/predict/chart.h"
#include "lab/predict/predict.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tests/support/text.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

ExchangeProfile profile_of(const std::string& method, double bytes, double encode_s) {
  ExchangeProfile p;
  p.model = "one_layer", p.method = method, p.backend = "gloo", p.ranks = 4, p.overlaps = true;
  p.sums = method == "dense", p.density = p.sums ? 1 : 0.01;
  p.parameters = {{"w", 1000000, !p.sums, 0.02, 0.02}};
  p.forward_s = 0.01, p.backward_s = 0.02;
  p.groups = {{1e6, bytes, 0, encode_s, encode_s}};
  p.link = {1e-4, 1e-8, 2e-5};
  p.gather = {1.4e-4, 3e-8, 4};
  p.reduce = {6e-4, 1.5e-8, 4};
  return p;
}

// Two forms of topk: the one with the shorter messages takes longer to encode.
AutoReport::Run run_of(const std::string& path) {
  return {path,
          {{"dense", profile_of("dense", 4e6, 0)},
           {"topk, density 0.01", profile_of("topk", 8e4, 2e-3)},
           {"topk, density 0.01, short indices", profile_of("topk", 5e4, 5e-3)}}};
}

AutoReport report_of(const std::vector<std::string>& paths, const std::vector<std::string>& rates) {
  std::vector<AutoReport::Run> runs;
  for (const std::string& path : paths) runs.push_back(run_of(path));
  std::vector<PredictedNetwork> networks;
  for (const std::string& rate : rates) networks.push_back(parse_network_rate(rate));
  return predict_auto(std::move(runs), {2, 4}, networks);
}

std::ptrdiff_t count(const std::string& text, const std::string& pattern) {
  const std::regex regex(pattern);
  return std::distance(std::sregex_iterator(text.begin(), text.end(), regex), std::sregex_iterator());
}

}  // namespace

TEST_CASE("predict --auto: the cells are those of the given places, each with every option") {
  const AutoReport report = report_of({"a"}, {"100gbit", "10mbit", "300mbit"});
  REQUIRE(report.cells.size() == 6);
  std::vector<std::string> places, choices;
  for (const auto& cell : report.cells) {
    places.push_back(std::to_string(cell.ranks) + " " + cell.network.name);
    choices.push_back(cell.at.choice().name);
    CHECK(cell.at.options.size() == 3);
  }
  CHECK(places ==
        std::vector<std::string>{"2 10mbit", "2 300mbit", "2 100gbit", "4 10mbit", "4 300mbit", "4 100gbit"});
  const std::string dense = "dense", topk = "topk, density 0.01", codes = "topk, density 0.01, short indices";
  CHECK(choices == std::vector<std::string>{codes, topk, dense, codes, topk, dense});
}

TEST_CASE("predict --auto: text, CSV and JSON say what is taken, by how much, and what would be tried") {
  const AutoReport report = report_of({"a \"b\""}, {"10mbit", "300mbit", "100gbit"});
  const std::string text = auto_text(report);
  CHECK(text.find("MODELLED") == 0);
  CHECK(says(text, {"A dense", "B topk, density 0.01\n", "C topk, density 0.01, short indices\n",
                    "within a factor of 2", "300mbit", "would try besides"}));
  CHECK(contains(text, "\n2      C 42x +B  B 3.9x +C    A +BC"));
  const auto& cell = report.cells[1];
  const auto json = nlohmann::json::parse(auto_json(report));
  REQUIRE(json["choices"].size() == 6);
  const auto& row = json["choices"][1];
  CHECK(row["modelled"] == true);
  CHECK((row["ranks"] == 2 && row["rate"] == "300mbit" && row["latency_s"] == "measured"));
  CHECK(row["choice"] == "topk, density 0.01");
  CHECK(row["options"][1]["step_s"] == row["step_s"]);
  CHECK(row["options"][0]["step_s"] == row["dense_step_s"]);
  CHECK(row["gain"] == Approx(cell.at.options[0].step_s / cell.at.options[1].step_s));
  CHECK(row["options"][2]["tried"] == true);
  CHECK(row["options"][0]["tried"] == false);

  const std::string csv = auto_csv(report);
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 1 + 6 * 3);
  CHECK(contains(csv,
                 "\nmodelled,\"a \"\"b\"\"\",\"one_layer\",2,300mbit,measured,"
                 "\"topk, density 0.01\",topk,1,"));
  CHECK(count(csv, ",1,1\n") == 6);  // one option of each cell is taken
}

TEST_CASE(
    "predict --auto: the map has a panel for each run and a field for each place, by the method's colour") {
  const AutoReport report = report_of({"a", "b<c>"}, {"10mbit", "measured", "300mbit", "100gbit"});
  const std::string html = auto_html(report);
  CHECK(count(html, "role=\"img\"") == 2);
  CHECK(contains(html, "b&lt;c&gt;: one_layer, latency as measured"));
  const auto colours = area_colours({"dense", "topk", "topk"});
  for (const std::string& colour : colours)  // two ranks, two runs; measured has no place on the map
    CHECK(count(html, "<rect [^>]*fill=\"" + colour + "\"") == 4);
  CHECK(says(html, {"A dense", "C topk, density 0.01, short indices", "2 ranks, 10mbit: takes topk",
                    "within a factor of 2", "What the model assumes", ">10M<", ">100G<"}));
  CHECK(html.find("<script") == std::string::npos);
  CHECK(count(html, "class=\"legend\"") == 1);
  // Only measured: tables without a map.
  CHECK(count(auto_html(report_of({"a"}, {"measured"})), "role=\"img\"") == 0);
}

TEST_CASE("predict --auto: each latency is a map of its own") {
  std::vector<PredictedNetwork> networks;
  for (const double latency : {1e-3, 1e-6})
    for (const char* rate : {"1gbit", "100mbit"}) {
      networks.push_back(parse_network_rate(rate));
      networks.back().latency = latency;
    }
  const AutoReport report = predict_auto({run_of("a")}, {2, 4}, networks);
  const std::string text = auto_text(report);
  CHECK(text.find("latency 1 us") < text.find("latency 1000 us"));
  CHECK(count(text, "\nranks +100mbit +1gbit\n") == 2);
  CHECK(count(auto_html(report), "role=\"img\"") == 2);
}

TEST_CASE("predict auto: a run's profiles are read from its folder or by the file's name") {
  const TempFolder temp;
  write_file(temp.at("auto_profiles.json"), named_profiles_json(run_of("").profiles));
  CHECK(read_auto_profiles(temp.str()).size() == 3);
  CHECK(read_auto_profiles(temp.at("auto_profiles.json")).size() == 3);
  const TempFolder empty;
  CHECK(user_error([&] { read_auto_profiles(empty.at("none")); }, {"none", "no such"}));
  CHECK(user_error([&] { read_auto_profiles(empty.str()); },
                   {"no auto_profiles.json", "train", "compress.name=auto", "dist.ranks=4"}));
}

}  // namespace topknot
