#include "tools/experiment/experiment.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "nn/base/text.h"

namespace topknot {
namespace {

template <class V>
bool parse(const std::string& text, V& value) {
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  return error == std::errc{} && at == end;
}

// Empty if an item is no value in [lo, hi].
template <class V>
std::vector<V> parse_list(const std::string& text, V lo, V hi) {
  std::vector<V> values;
  for (const std::string& item : cells_of(text)) {
    V value;
    if (!parse(item, value) || !(value >= lo && value <= hi)) return {};
    values.push_back(value);
  }
  return values;
}

}  // namespace

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');) cells.push_back(cell);
  return cells;
}

ExperimentArguments::ExperimentArguments(const std::string& experiment,
                                         const std::vector<ExperimentKey>& keys,
                                         const std::vector<std::string>& given)
    : experiment_(experiment) {
  std::vector<std::string> names, seen;
  for (const ExperimentKey& key : keys) values_[key.name] = key.value, names.push_back(key.name);
  for (const std::string& text : given) {
    const auto equals = text.find('=');
    if (equals == std::string::npos)
      throw UserError("'" + text + "' is not key=value; 'experiment " + experiment +
                      " --help' lists the keys");
    const std::string name = text.substr(0, equals);
    if (values_.count(name) == 0) throw UserError(unknown_name_message("key of " + experiment, name, names));
    if (std::find(seen.begin(), seen.end(), name) != seen.end())
      throw UserError("'" + name + "' is given twice; give it once");
    seen.push_back(name);
    values_[name] = text.substr(equals + 1);
  }
}

void ExperimentArguments::refuse(const std::string& key, const std::string& needs) const {
  throw UserError(key + " of experiment " + experiment_ + " needs " + needs + ", not '" + values_.at(key) +
                  "'");
}

const std::string& ExperimentArguments::text(const std::string& key) const {
  return values_.at(key);
}

std::int64_t ExperimentArguments::integer(const std::string& key, std::int64_t lo, std::int64_t hi) const {
  std::int64_t value = 0;
  if (!parse(text(key), value) || value < lo || value > hi)
    refuse(key, fmt::format("a whole number from {} to {}", lo, hi));
  return value;
}

std::vector<double> ExperimentArguments::numbers(const std::string& key, double lo, double hi) const {
  const auto values = parse_list(text(key), lo, hi);
  if (values.empty()) refuse(key, fmt::format("numbers from {:g} to {:g}, as in 1,2", lo, hi));
  return values;
}

std::vector<std::int64_t> ExperimentArguments::integers(const std::string& key, std::int64_t lo,
                                                        std::int64_t hi) const {
  const auto values = parse_list(text(key), lo, hi);
  if (values.empty()) refuse(key, fmt::format("whole numbers from {} to {}, as in 1,2", lo, hi));
  return values;
}

std::string ExperimentArguments::folder(const std::string& key) const {
  if (text(key).empty()) refuse(key, "a folder");
  std::error_code error;
  std::filesystem::create_directories(text(key), error);
  if (error || !std::filesystem::is_directory(text(key)))
    throw UserError(key + ": cannot create the folder '" + text(key) + "'" +
                    (error ? ": " + error.message() : ""));
  return text(key);
}

void ExperimentRows::add(const nlohmann::ordered_json& row) {
  if (csv.empty()) {
    for (const auto& [name, value] : row.items()) csv += (csv.empty() ? "" : ",") + name;
    csv += "\n";
  }
  std::string line;
  for (const auto& [name, value] : row.items())
    line += (line.empty() ? "" : ",") + (value.is_string()         ? value.get<std::string>()
                                         : value.is_number_float() ? short_text(value.get<double>())
                                                                   : value.dump());
  csv += line + "\n";
  jsonl += row.dump() + "\n";
}

Registry<Experiment>& experiments() {
  static Registry<Experiment> registry("experiment");
  return registry;
}

std::string experiments_help() {
  std::string text =
      "experiment: small experiments on one process; each prints a table and writes its numbers and "
      "plots.\n\n"
      "  experiment NAME [key=value ...]\n"
      "  experiment NAME --help            its keys\n\nExperiments:\n";
  for (const std::string& name : experiments().names())
    text += fmt::format("  {:<20}{}\n", name, experiments().help(name));
  return text +
         "\nExamples:\n  experiment toy\n  experiment regression iterations=1000 s=0.6 out=studies/quick\n";
}

std::string experiment_help(const std::string& experiment) {
  std::string text = "experiment " + experiment + ": " +
                     (experiments().find(experiment), experiments().help(experiment)) + "\n\n";
  for (const ExperimentKey& key : experiments().find(experiment).keys)
    text += fmt::format("  {:<14}{} (default: {})\n", key.name, key.help, key.value);
  return text;
}

}  // namespace topknot
