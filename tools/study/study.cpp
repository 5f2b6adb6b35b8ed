#include "tools/study/study.h"

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

// Empty where an item is no value in [lo, hi].
template <class V>
std::vector<V> parse_list(const std::string& text, V lo, V hi) {
  std::vector<V> values;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    V value;
    if (!parse(item, value) || !(value >= lo && value <= hi)) return {};
    values.push_back(value);
  }
  return values;
}

}  // namespace

StudyArguments::StudyArguments(const std::string& study, const std::vector<StudyKey>& keys,
                               const std::vector<std::string>& given)
    : study_(study) {
  std::vector<std::string> names, seen;
  for (const StudyKey& key : keys) values_[key.name] = key.value, names.push_back(key.name);
  for (const std::string& text : given) {
    const auto equals = text.find('=');
    if (equals == std::string::npos)
      throw UserError("'" + text + "' is not key=value; 'study " + study + " --help' lists the keys");
    const std::string name = text.substr(0, equals);
    if (values_.count(name) == 0) throw UserError(unknown_name_message("key of " + study, name, names));
    if (std::find(seen.begin(), seen.end(), name) != seen.end())
      throw UserError("'" + name + "' is given twice; give it once");
    seen.push_back(name);
    values_[name] = text.substr(equals + 1);
  }
}

void StudyArguments::refuse(const std::string& key, const std::string& needs) const {
  throw UserError(key + " of study " + study_ + " needs " + needs + ", not '" + values_.at(key) + "'");
}

const std::string& StudyArguments::text(const std::string& key) const {
  return values_.at(key);
}

std::int64_t StudyArguments::integer(const std::string& key, std::int64_t lo, std::int64_t hi) const {
  std::int64_t value = 0;
  if (!parse(text(key), value) || value < lo || value > hi)
    refuse(key, fmt::format("a whole number from {} to {}", lo, hi));
  return value;
}

std::vector<double> StudyArguments::numbers(const std::string& key, double lo, double hi) const {
  const auto values = parse_list(text(key), lo, hi);
  if (values.empty()) refuse(key, fmt::format("numbers from {:g} to {:g}, as in 1,2", lo, hi));
  return values;
}

std::vector<std::int64_t> StudyArguments::integers(const std::string& key, std::int64_t lo,
                                                   std::int64_t hi) const {
  const auto values = parse_list(text(key), lo, hi);
  if (values.empty()) refuse(key, fmt::format("whole numbers from {} to {}, as in 1,2", lo, hi));
  return values;
}

std::string StudyArguments::folder(const std::string& key) const {
  if (text(key).empty()) refuse(key, "a folder");
  std::error_code error;
  std::filesystem::create_directories(text(key), error);
  if (error || !std::filesystem::is_directory(text(key)))
    throw UserError(key + ": cannot create the folder '" + text(key) + "'" +
                    (error ? ": " + error.message() : ""));
  return text(key);
}

void StudyRows::add(const nlohmann::ordered_json& row) {
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

Registry<Study>& studies() {
  static Registry<Study> registry("study");
  return registry;
}

std::string studies_help() {
  std::string text =
      "study: small experiments on one process; each prints a table and writes its numbers and plots.\n\n"
      "  study NAME [key=value ...]\n"
      "  study NAME --help            its keys\n\nStudies:\n";
  for (const std::string& name : studies().names())
    text += fmt::format("  {:<20}{}\n", name, studies().help(name));
  return text + "\nExamples:\n  study toy\n  study regression iterations=1000 s=0.6 out=studies/quick\n";
}

std::string study_help(const std::string& study) {
  std::string text = "study " + study + ": " + (studies().find(study), studies().help(study)) + "\n\n";
  for (const StudyKey& key : studies().find(study).keys)
    text += fmt::format("  {:<14}{} (default: {})\n", key.name, key.help, key.value);
  return text;
}

}  // namespace topknot
