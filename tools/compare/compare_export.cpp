// The numbers of a comparison for other programs. docs/compare.md documents every name.

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tools/compare/compare.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

struct StatColumn {
  std::string name;
  Stat Method::*stat;
};

// "final_word_error_rate"
std::string column_name(const char* which, std::string metric) {
  std::replace(metric.begin(), metric.end(), ' ', '_');
  return which + metric;
}

std::vector<StatColumn> stat_columns(const Comparison& c) {
  const Metric& metric = c.metric;
  std::vector<StatColumn> columns{{column_name("best_", metric.name), &Method::best},
                                  {column_name("final_", metric.name), &Method::last}};
  if (has(c, &Method::second)) columns.push_back({column_name("final_", metric.second()), &Method::second});
  if (metric.set != "test") columns.push_back({column_name("test_", metric.name), &Method::held_out});
  const std::vector<StatColumn> others{
      {"wall_seconds", &Method::wall_seconds},           {"images_per_second", &Method::images_per_second},
      {"seconds_to_target", &Method::seconds_to_target}, {"steps_to_target", &Method::steps_to_target},
      {"bytes_sent", &Method::bytes_per_step},           {"bytes_received", &Method::received_per_step}};
  columns.insert(columns.end(), others.begin(), others.end());
  return columns;
}

struct NumberColumn {
  const char* name;
  double Method::*number;
};
constexpr NumberColumn kNumbers[] = {{"bytes_ratio", &Method::dense_ratio},
                                     {"speed_up", &Method::speed_up},
                                     {"target_speed_up", &Method::target_speed_up}};

struct PartColumn {
  const char* name;
  double StepTimes::*seconds;
};
constexpr PartColumn kPartColumns[] = {
    {"step_s", &StepTimes::total},      {"data_s", &StepTimes::data},
    {"forward_s", &StepTimes::forward}, {"backward_s", &StepTimes::backward},
    {"encode_s", &StepTimes::encode},   {"exposed_s", &StepTimes::exposed},
    {"decode_s", &StepTimes::decode},   {"update_s", &StepTimes::update},
    {"other_s", &StepTimes::other},     {"hidden_s", &StepTimes::hidden}};

std::string cell(double value) {
  return std::isfinite(value) ? fmt::format("{:.9g}", value) : std::string();
}

std::string csv_quoted(const std::string& text) {
  std::string result = "\"";
  for (const char sign : text) result += sign == '"' ? "\"\"" : std::string(1, sign);
  return result + "\"";
}

Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

std::size_t complete_runs(const Method& m) {
  return m.complete ? m.counted.size() : 0;
}

Json method_json(const Comparison& c, std::size_t i) {
  const Method& m = c.methods[i];
  Json row;
  row["method"] = m.name;
  row["compressor"] = m.compressor;
  row["keys"] = Json::object();
  for (const DifferingKey& key : c.differing) row["keys"][key.key] = key.values[i];
  row["network"] = m.network;
  row["runs"] = m.runs.size();
  row["complete"] = complete_runs(m);
  row["reached_target"] = m.reached;
  row["baseline"] = m.baseline ? Json(c.methods[*m.baseline].name) : Json(nullptr);
  for (const auto& [name, member] : stat_columns(c)) {
    const Stat& stat = m.*member;
    row[name] = number(stat.mean);
    row[name + "_deviation"] = stat.count > 1 ? number(stat.deviation) : Json(nullptr);
  }
  for (const auto& [name, member] : kNumbers) row[name] = number(m.*member);
  for (const auto& [name, member] : kPartColumns) row[name] = number(m.times.*member);
  return row;
}

Json run_json(const Comparison& c, const Run& run, const Method& method) {
  const auto& end = run.metrics.end;
  return {{"run", run.path},
          {"method", method.name},
          {"seed", run.config.text("seed")},
          {"complete", run.complete()},
          {"steps", end ? end->steps : run.metrics.steps.back().step},
          {column_name("best_", c.metric.name), number(run.best)},
          {column_name("final_", c.metric.name), number(run.last)},
          {"wall_seconds", number(run.wall_seconds)},
          {"images_per_second", number(run.images_per_second)},
          {"parameter_checksum", end ? Json(end->parameter_checksum) : Json(nullptr)}};
}

}  // namespace

std::string comparison_csv(const Comparison& c) {
  const auto columns = stat_columns(c);
  std::string text = "method,runs,complete";
  for (const auto& [name, stat] : columns) text += "," + name + "," + name + "_deviation";
  for (const auto& [name, value] : kNumbers) text += std::string(",") + name;
  for (const auto& [name, value] : kPartColumns) text += std::string(",") + name;
  text += ",network,task,keys\n";
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    const Method& m = c.methods[i];
    text += fmt::format("{},{},{}", csv_quoted(m.name), m.runs.size(), complete_runs(m));
    for (const auto& [name, member] : columns) {
      const Stat& stat = m.*member;
      text += "," + cell(stat.mean) + "," + (stat.count > 1 ? cell(stat.deviation) : "");
    }
    for (const auto& [name, member] : kNumbers) text += "," + cell(m.*member);
    for (const auto& [name, member] : kPartColumns) text += "," + cell(m.times.*member);
    std::string keys;
    for (const DifferingKey& row : c.differing)
      keys += (keys.empty() ? "" : " ") + row.key + "=" + row.values[i];
    text += "," + csv_quoted(m.network) + "," + csv_quoted(c.task) + "," + csv_quoted(keys) + "\n";
  }
  return text;
}

std::string comparison_json(const Comparison& c) {
  Json json;
  json["task"] = c.task;
  json["metric"] = {
      {"name", c.metric.name}, {"unit", c.metric.unit}, {"higher_is_better", c.metric.higher_is_better}};
  json["target"] = number(c.target);
  json["target_reason"] = c.target_reason;
  json["methods"] = Json::array();
  for (std::size_t i = 0; i < c.methods.size(); ++i) json["methods"].push_back(method_json(c, i));
  json["runs"] = Json::array();
  for (const Method& m : c.methods)
    for (const auto i : m.runs) json["runs"].push_back(run_json(c, c.runs[i], m));
  json["warnings"] = c.warnings;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace topknot
