#include "tools/gpu_check/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "nn/base/check.h"
#include "train/metrics/output_file.h"

namespace topknot::gpu_check {
namespace {

using Json = nlohmann::ordered_json;

std::string figure_text(const Result& result) {
  std::string text;
  for (const auto& [name, value] : result.figures) {
    text += fmt::format("{}{:.4g} {}", text.empty() ? "" : ", ", value, name);
  }
  return text;
}

// A program's line may hold anything; a table's line may not.
std::string one_line(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < ' ' || c == 127) c = ' ';
  return text;
}

Json json_of(const Result& result) {
  Json one{{"stage", result.stage}, {"name", result.name}, {"result", name_of(result.status)}};
  one["seconds"] = result.seconds;
  one["figures"] = Json::object();
  for (const auto& [name, value] : result.figures) one["figures"][name] = value;
  if (!result.note.empty()) one["note"] = result.note;
  if (!result.output.empty()) one["output"] = result.output;
  return one;
}

std::string dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

const char* name_of(Status status) {
  return status == Status::passed ? "passed" : status == Status::failed ? "FAILED" : "skipped";
}

std::string json_line(const Result& result) {
  return dump(json_of(result), -1);
}

std::optional<Result> result_of(const std::string& line) {
  const Json json = Json::parse(line, nullptr, false);
  try {
    Result result{json.at("stage"), json.at("name")};
    const std::string status = json.at("result");
    if (status != "passed") result.status = status == "skipped" ? Status::skipped : Status::failed;
    result.seconds = json.at("seconds");
    for (const auto& [name, value] : json.at("figures").items()) result.figures.emplace_back(name, value);
    result.note = json.value("note", "");
    return result;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

Report::Report(std::string folder) : folder_(std::move(folder)) {
  if (folder_.empty()) throw UserError("--out: the folder of the results has no name");
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) throw UserError("--out: " + folder_ + " cannot be made: " + error.message());
  write();
}

void Report::describe(const std::string& what, const std::string& value) {
  about_.emplace_back(what, value);
}

void Report::add(Result result) {
  result.note = one_line(std::move(result.note));
  const std::string figures = figure_text(result);
  fmt::print("{:<8} {:<8} {:<46} {}{}{}\n", result.stage, name_of(result.status), result.name, figures,
             figures.empty() || result.note.empty() ? "" : "; ", result.note);
  std::fflush(stdout);
  results_.push_back(std::move(result));
  write();
}

void Report::write() const {
  write_file(folder_ + "/gpu-check.json", json());
  write_file(folder_ + "/gpu-check.txt", table());
}

bool Report::any(Status status) const {
  return std::any_of(results_.begin(), results_.end(), [=](const Result& r) { return r.status == status; });
}

std::string Report::json() const {
  Json all;
  all["about"] = Json::object();
  for (const auto& [what, value] : about_) all["about"][what] = value;
  all["results"] = Json::array();
  for (const Result& result : results_) all["results"].push_back(json_of(result));
  return dump(all, 2) + "\n";
}

std::string Report::table() const {
  std::string text;
  for (const auto& [what, value] : about_) text += fmt::format("{}: {}\n", what, one_line(value));
  text += fmt::format("{}{:<8} {:<8} {:>8}  {}\n", about_.empty() ? "" : "\n", "stage", "result", "seconds",
                      "check");
  for (const Result& result : results_) {
    text += fmt::format("{:<8} {:<8} {:>8.1f}  {}", result.stage, name_of(result.status), result.seconds,
                        result.name);
    if (const std::string figures = figure_text(result); !figures.empty()) text += ": " + figures;
    text += result.note.empty() ? "\n" : fmt::format(" ({})\n", result.note);
  }
  return text;
}

}  // namespace topknot::gpu_check
