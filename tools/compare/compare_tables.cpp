// The tables of a comparison for the terminal and the report, and its numbers for other programs;
// docs/compare.md documents every name of these.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "nn/base/text.h"
#include "tools/compare/compare.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kNone = "-";

// `pattern` as fmt has it: "{:.1f}".
std::string number_text(const char* pattern, double value) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(pattern), value) : kNone;
}

std::string with_deviation(const Stat& stat, const char* pattern, double factor, const std::string& unit) {
  if (stat.count == 0) return kNone;
  std::string text = number_text(pattern, factor * stat.mean);
  if (stat.count > 1) text += " ± " + number_text(pattern, factor * stat.deviation);
  return text + unit;
}

// 4 significant digits are more than any timing holds.
const char* rate_pattern(double value) {
  return value < 10 ? "{:.2f}" : value < 100 ? "{:.1f}" : "{:.0f}";
}

std::string seconds_text(const Stat& stat) {
  return with_deviation(stat, stat.mean < 10 ? "{:.2f}" : "{:.1f}", 1, " s");
}

std::string times(double factor) {
  return std::isfinite(factor) ? fmt::format("{:.2f}×", factor) : kNone;
}

std::string reached_text(const Method& m, std::string text) {
  const auto all = static_cast<int>(m.counted.size());
  if (m.reached == 0) return "not reached";
  if (m.reached < all) text += fmt::format(" ({} of {})", m.reached, all);
  return text;
}

std::string runs_text(const Method& m) {
  std::string text = std::to_string(m.runs.size());
  const auto complete = m.complete ? m.counted.size() : 0;
  if (complete < m.runs.size()) text += fmt::format(" ({} incomplete)", m.runs.size() - complete);
  return text;
}

void leave_out_empty_columns(Table& table) {
  for (std::size_t i = table.header.size(); i-- > 0;) {
    if (std::ranges::any_of(table.rows, [&](const auto& row) { return row[i] != kNone; })) continue;
    const auto at = static_cast<std::ptrdiff_t>(i);
    table.header.erase(table.header.begin() + at);
    for (auto& row : table.rows) row.erase(row.begin() + at);
  }
}

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
                                     {"bits_per_parameter_step", &Method::bits},
                                     {"speed_up", &Method::speed_up},
                                     {"target_speed_up", &Method::target_speed_up}};

std::string cell(double value) {
  return std::isfinite(value) ? fmt::format("{:.9g}", value) : std::string();
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
  for (const StepPart& part : kStepParts) row[part.column] = number(m.times.*part.seconds);
  return row;
}

Json run_json(const Comparison& c, const Run& run, const Method& method) {
  const auto& end = run.metrics.end;
  return {{"run", run.path},
          {"method", method.name},
          {"seed", run.config.text("seed")},
          {"complete", run.complete()},
          {"failed", end && end->failed},
          {"steps", end ? end->steps : run.metrics.steps.back().step},
          {column_name("best_", c.metric.name), number(run.best)},
          {column_name("final_", c.metric.name), number(run.last)},
          {"wall_seconds", number(run.wall_seconds)},
          {"images_per_second", number(run.images_per_second)},
          {"parameter_checksum", end ? Json(end->parameter_checksum) : Json(nullptr)}};
}

}  // namespace

bool has_times(const Comparison& c) {
  return std::ranges::any_of(c.methods, [](const Method& m) { return m.times.total > 0; });
}

std::string title_of(const Metric& metric) {
  return metric.name == "accuracy" ? metric.name : metric.title();
}

std::string value_text(const Metric& metric, const Stat& stat) {
  return metric.unit == "share" ? with_deviation(stat, "{:.1f}", 100, " %")
                                : with_deviation(stat, "{:.4g}", 1, "");
}

Table result_table(const Comparison& c) {
  const std::string quality = title_of(c.metric);
  Table table;
  table.header = {"method", "runs", "best " + quality, "final " + quality};
  const bool second = has(c, &Method::second), held_out = has(c, &Method::held_out);
  if (second) table.header.push_back(std::string("final ") + c.metric.second());
  if (held_out) table.header.push_back("test " + c.metric.name);
  if (!std::isnan(c.target)) {
    const std::string target = value_text(c.metric, stat_of({c.target}));
    table.header.push_back("steps to " + target);
    table.header.push_back("time to " + target);
    table.header.push_back("speed-up to it");
  }
  for (const char* name :
       {"training time", c.metric.rate_unit(), "speed-up", "sent per step", "received", "compression"})
    table.header.push_back(name);
  const bool networks = shared_network(c.methods).empty();
  if (networks) table.header.push_back("network");
  for (const Method& m : c.methods) {
    std::vector<std::string> row = {m.name, runs_text(m), value_text(c.metric, m.best),
                                    value_text(c.metric, m.last)};
    if (second) row.push_back(value_text(c.metric, m.second));
    if (held_out) row.push_back(value_text(c.metric, m.held_out));
    if (!std::isnan(c.target)) {
      row.push_back(reached_text(m, with_deviation(m.steps_to_target, "{:.0f}", 1, "")));
      row.push_back(reached_text(m, seconds_text(m.seconds_to_target)));
      row.push_back(times(m.target_speed_up));
    }
    row.push_back(seconds_text(m.wall_seconds));
    row.push_back(with_deviation(m.images_per_second, rate_pattern(m.images_per_second.mean), 1, ""));
    row.push_back(times(m.speed_up));
    row.push_back(m.bytes_per_step.count ? format_bytes(m.bytes_per_step.mean) : kNone);
    row.push_back(m.received_per_step.count ? format_bytes(m.received_per_step.mean) : kNone);
    row.push_back(std::isfinite(m.dense_ratio)
                      ? number_text(m.dense_ratio < 10 ? "{:.2f}×" : "{:.0f}×", m.dense_ratio)
                      : kNone);
    if (networks) row.push_back(m.network.empty() ? kNone : m.network);
    table.rows.push_back(std::move(row));
  }
  if (!has_times(c)) leave_out_empty_columns(table);
  return table;
}

Table time_table(const Comparison& c) {
  Table table;
  table.header = {"ms per step"};
  for (const StepPart& part : kStepParts) table.header.push_back(part.head);
  for (const Method& m : c.methods) {
    std::vector<std::string> row = {m.name};
    for (const StepPart& part : kStepParts) {
      const double seconds = m.times.*part.seconds;
      row.push_back(number_text(seconds < 0.0995 ? "{:.2f}" : "{:.1f}", 1000 * seconds));
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table difference_table(const Comparison& c) {
  Table table;
  table.header = {"key"};
  for (const Method& m : c.methods) table.header.push_back(m.name);
  for (const auto& difference : c.differing) {
    table.rows.push_back({difference.key});
    for (const auto& value : difference.values) table.rows.back().push_back(value);
  }
  return table;
}

Table run_table(const Comparison& c) {
  const std::string quality = title_of(c.metric);
  Table table;
  table.header = {"run",
                  "method",
                  "seed",
                  "state",
                  "steps",
                  "best " + quality,
                  "final " + quality,
                  "training time",
                  "evaluation",
                  "start-up",
                  c.metric.rate_unit(),
                  "step p50 / p95",
                  "parameters"};
  for (const Method& m : c.methods)
    for (const auto i : m.runs) {
      const Run& r = c.runs[i];
      const auto& end = r.metrics.end;
      table.rows.push_back(
          {r.path, m.name, r.config.text("seed"),
           !end          ? "incomplete"
           : end->failed ? "failed"
                         : "complete",
           std::to_string(end ? end->steps : r.metrics.steps.back().step),
           value_text(c.metric, stat_of({r.best})), value_text(c.metric, stat_of({r.last})),
           seconds_text(stat_of({r.wall_seconds})), end ? seconds_text(stat_of({end->eval_seconds})) : kNone,
           end ? seconds_text(stat_of({end->startup_seconds})) : kNone,
           number_text(rate_pattern(r.images_per_second), r.images_per_second),
           end && std::isfinite(1000 * (end->step_p50_s + end->step_p95_s))
               ? fmt::format("{:.1f} / {:.1f} ms", 1000 * end->step_p50_s, 1000 * end->step_p95_s)
               : kNone,
           end ? end->parameter_checksum : kNone});
    }
  if (!has_times(c)) leave_out_empty_columns(table);
  return table;
}

std::string comparison_text(const Comparison& c) {
  const std::string network = shared_network(c.methods);
  std::string text = "task: " + (c.task.empty() ? kNone : one_line(c.task)) + "\n" +
                     (network.empty() ? "" : "network: " + one_line(network) + "\n") + "\n";
  text += table_text(result_table(c));
  for (const Abbreviation& a : c.abbreviations)
    text += fmt::format("\n{}: {}", one_line(a.text), one_line(a.keys));
  if (!c.abbreviations.empty()) text += "\n";
  if (!std::isnan(c.target))
    text += fmt::format(
        "\nTarget {} {}: {}.\nTimes are of training alone; evaluation and start-up are left out. "
        "Speed-ups are over the dense run.\n",
        title_of(c.metric), value_text(c.metric, stat_of({c.target})), c.target_reason);
  if (has_times(c)) text += "\n" + table_text(time_table(c));
  if (!c.differing.empty()) text += "\nKeys that differ:\n" + table_text(difference_table(c));
  for (const auto& warning : c.warnings) text += "\nNote: " + one_line(warning) + ".";
  return c.warnings.empty() ? text : text + "\n";
}

std::string comparison_csv(const Comparison& c) {
  const auto columns = stat_columns(c);
  std::string text = "method,runs,complete";
  for (const auto& [name, stat] : columns) text += "," + name + "," + name + "_deviation";
  for (const auto& [name, value] : kNumbers) text += std::string(",") + name;
  for (const StepPart& part : kStepParts) text += std::string(",") + part.column;
  text += ",network,task,keys\n";
  for (std::size_t i = 0; i < c.methods.size(); ++i) {
    const Method& m = c.methods[i];
    text += fmt::format("{},{},{}", csv_quoted(m.name), m.runs.size(), complete_runs(m));
    for (const auto& [name, member] : columns) {
      const Stat& stat = m.*member;
      text += "," + cell(stat.mean) + "," + (stat.count > 1 ? cell(stat.deviation) : "");
    }
    for (const auto& [name, member] : kNumbers) text += "," + cell(m.*member);
    for (const StepPart& part : kStepParts) text += "," + cell(m.times.*part.seconds);
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
