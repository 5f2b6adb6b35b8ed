#include "tools/gpu_check/report.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "nn/core/base/check.h"

namespace topknot::gpu_check {
namespace {

using Json = nlohmann::ordered_json;

void replace_file(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::trunc);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(part, path, error);
  if (!file || error) {
    std::error_code ignored;
    std::filesystem::remove(part, ignored);
    throw UserError(path + " cannot be written; give another folder with --out");
  }
}

std::string figure_text(const Result& result) {
  std::string text;
  for (const auto& [name, value] : result.figures) {
    char number[32];
    std::snprintf(number, sizeof number, "%.4g", value);
    text += (text.empty() ? "" : ", ") + std::string(number) + " " + name;
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
  write();
}

void Report::describe(const std::string& what, const std::string& value) {
  about_.emplace_back(what, value);
}

void Report::add(Result result) {
  result.note = one_line(std::move(result.note));
  const std::string figures = figure_text(result);
  std::printf("%-8s %-8s %-46s %s%s%s\n", result.stage.c_str(), name_of(result.status), result.name.c_str(),
              figures.c_str(), figures.empty() || result.note.empty() ? "" : "; ", result.note.c_str());
  std::fflush(stdout);
  results_.push_back(std::move(result));
  write();
}

void Report::write() const {
  replace_file(folder_ + "/gpu-check.json", json());
  replace_file(folder_ + "/gpu-check.txt", table());
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
  std::ostringstream text;
  for (const auto& [what, value] : about_) text << what << ": " << one_line(value) << "\n";
  char line[200];
  std::snprintf(line, sizeof line, "%s%-8s %-8s %8s  %s\n", about_.empty() ? "" : "\n", "stage", "result",
                "seconds", "check");
  text << line;
  for (const Result& result : results_) {
    std::snprintf(line, sizeof line, "%-8s %-8s %8.1f  ", result.stage.c_str(), name_of(result.status),
                  result.seconds);
    text << line << result.name;
    if (const std::string figures = figure_text(result); !figures.empty()) text << ": " << figures;
    if (!result.note.empty()) text << " (" << result.note << ")";
    text << "\n";
  }
  return text.str();
}

}  // namespace topknot::gpu_check
