#include "tools/gpu_check/training.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "nn/core/base/check.h"

namespace topknot::gpu_check {

std::string fresh_run_directory(const std::string& out, const std::string& name) {
  const std::string folder = out + "/runs/" + name;
  std::error_code error;
  std::filesystem::remove_all(folder, error);
  if (error) throw UserError(folder + " is of an earlier check and cannot be removed; remove it");
  return folder;
}

RunEnd end_of_run(const std::string& folder) {
  std::ifstream lines(folder + "/metrics.jsonl");
  RunEnd end;
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    if (!record.is_object() || !record.contains("event") || record["event"] != "end") continue;
    if (const auto at = record.find("parameter_checksum"); at != record.end() && at->is_string())
      end.checksum = *at;
    if (const auto at = record.find("step_p50_s"); at != record.end() && at->is_number()) end.step_s = *at;
  }
  return end;
}

}  // namespace topknot::gpu_check
