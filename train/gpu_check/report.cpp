#include "train/gpu_check/report.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "nn/core/check.h"
#include "nn/core/text.h"

namespace topknot::gpu_check {
namespace {

void replace_file(const std::string& path, const std::string& text) {
  const std::string part = path + ".part";
  std::ofstream file(part, std::ios::trunc);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(part, path, error);
  if (!file || error) throw UserError(path + " cannot be written; give another folder with --out");
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

}  // namespace

const char* name_of(Status status) {
  return status == Status::passed ? "passed" : status == Status::failed ? "FAILED" : "skipped";
}

Report::Report(std::string folder) : folder_(std::move(folder)) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  write();
}

void Report::describe(const std::string& what, const std::string& value) {
  about_.emplace_back(what, value);
}

void Report::add(Result result) {
  const std::string figures = figure_text(result);
  std::printf("%-8s %-8s %-46s %s%s%s\n", result.stage.c_str(), name_of(result.status), result.name.c_str(),
              figures.c_str(), figures.empty() || result.note.empty() ? "" : "; ", result.note.c_str());
  std::fflush(stdout);
  results_.push_back(std::move(result));
}

void Report::write() const {
  replace_file(folder_ + "/gpu-check.json", json());
  replace_file(folder_ + "/gpu-check.txt", table());
}

bool Report::any(Status status) const {
  return std::any_of(results_.begin(), results_.end(), [=](const Result& r) { return r.status == status; });
}

std::string Report::json() const {
  nlohmann::ordered_json all;
  for (const auto& [what, value] : about_) all["about"][what] = value;
  all["results"] = nlohmann::ordered_json::array();
  for (const Result& result : results_) {
    nlohmann::ordered_json one{{"stage", result.stage},
                               {"name", result.name},
                               {"status", name_of(result.status)},
                               {"seconds", result.seconds}};
    for (const auto& [name, value] : result.figures) one["figures"][name] = value;
    if (!result.note.empty()) one["note"] = result.note;
    all["results"].push_back(one);
  }
  return all.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string Report::table() const {
  std::ostringstream text;
  for (const auto& [what, value] : about_) text << what << ": " << value << "\n";
  char line[200];
  std::snprintf(line, sizeof line, "\n%-8s %-8s %8s  %s\n", "stage", "result", "seconds", "check");
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
