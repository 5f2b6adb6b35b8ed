#include "train/run_directory.h"

#include <fmt/format.h>
#include <omp.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"
#include "train/version.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0)
      if (const auto colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "unknown";
}

std::string environment_json(const Config& config, const std::vector<std::string>& command_line,
                             const std::map<std::string, std::string>& libraries) {
  nlohmann::ordered_json json;
  utsname system{};
  uname(&system);
  json["host"] = host_name();
  json["cpu"] = cpu_name();
  json["cores"] = std::thread::hardware_concurrency();
  json["system"] = std::string(system.sysname) + " " + system.release + " " + system.machine;
  json["compiler"] = __VERSION__;
  json["topknot"] = program_number();
  json["revision"] = program_revision();
  json["libraries"] = libraries;
  json["backend"] = config.dist.backend;
  json["ranks"] = config.dist.ranks;
  json["threads_per_rank"] = std::min(compute_threads(config), omp_get_thread_limit());
  json["started"] = now_utc();
  json["command_line"] = nlohmann::ordered_json::array();
  for (const std::string& word : command_line) json["command_line"].push_back(without_secret(word));
  // Arguments need not be valid UTF-8.
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

constexpr const char* kEnvironmentFile = "environment.json";
constexpr const char* kConfigTitle = "# The effective configuration:";

// "" where the file is absent or none that a run writes.
std::string small_file(const std::string& path) {
  constexpr std::size_t kMostBytes = 16 << 20;
  try {
    return read_text_file(path, kMostBytes);
  } catch (const UserError&) {
    return "";
  }
}

// Whether a start that wrote no whole file has left what is in there.
bool is_half_start(const RunDirectory& folder) {
  const std::string half = std::string(kEnvironmentFile) + ".part-";
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder.path, error))
    if (const std::string name = entry.path().filename().string();
        name != RunLock::kName && !name.starts_with(half))
      return false;
  return !error;
}

// Whether the files in there are a run's, so that their names can be trusted. environment.json is the first file that a
// run writes and the last that is removed, so what a killed start left is a run too.
bool is_run(const RunDirectory& folder) {
  if (is_half_start(folder)) return true;
  using Json = nlohmann::json;
  const auto shallow = [](int depth, Json::parse_event_t, const Json&) { return depth < 8; };
  const Json environment = Json::parse(small_file(folder.path + "/" + kEnvironmentFile), shallow, false);
  if (!environment.is_object()) return false;
  for (const char* name : {"topknot", "started", "command_line"})
    if (!environment.contains(name)) return false;
  std::error_code error;
  const std::string config = folder.path + "/config.yaml";
  return !fs::exists(fs::symlink_status(config, error)) || small_file(config).rfind(kConfigTitle, 0) == 0;
}

// config.yaml, trace_rank3.json, metrics.csv.part-4242, ...
bool has_run_name(const std::string& name) {
  static const std::regex names(
      "(config\\.yaml|environment\\.json|bench\\.json|metrics\\.(jsonl|csv)|gradients\\.npy|trace_rank[0-9]+"
      "\\.json)"
      "(\\.part-[0-9]+)?|checkpoints|(layer_density|exchange_profile)\\.json\\.part-[0-9]+|"
      "events\\.out\\.tfevents\\..*");
  return std::regex_match(name, names);
}

// step-000001200, step-000001200.partial, step-000001200.passed-over-2, ...
bool is_checkpoint_name(const std::string& name) {
  static const std::regex names("step-[0-9]+(\\.partial|\\.removed\\.partial|\\.passed-over(-[0-9]+)?)?");
  return std::regex_match(name, names);
}

// Throws where what the folder holds is not to be replaced.
void check_free(const RunDirectory& folder, bool overwrite) {
  std::error_code error;
  if (!fs::exists(folder.path, error)) return;
  const auto refuse = [&](const std::string& why) { throw UserError("output.dir: " + folder.path + why); };
  if (!fs::is_directory(folder.path, error)) refuse(" is a file, not a folder; choose another name");
  bool empty = true;
  const bool of_a_run = is_run(folder);
  for (const auto& entry : fs::directory_iterator(folder.path, error)) {
    const std::string name = entry.path().filename().string();
    empty = empty && name == RunLock::kName;
    if (overwrite && !of_a_run && has_run_name(name))
      refuse(" holds " + name +
             ", but no run wrote it; output.overwrite replaces only an earlier run; choose another "
             "output.dir");
  }
  if (error) refuse(" cannot be read: " + error.message());
  if (!empty && !overwrite)
    refuse(fmt::format(
        " already holds {}, and a run is never overwritten silently; choose another output.dir, or "
        "output.overwrite=true to replace the earlier run{}",
        of_a_run ? "a run" : "something",
        of_a_run && fs::exists(folder.checkpoints(), error)
            ? "; train --resume " + folder.path + " goes on with it"
            : ""));
}

// output.overwrite and section resume belong to this start, not to the configuration: repeating the run must not delete
// anything, and residuals that were summed once are kept by the next start.
std::string effective_config(const RunDirectory& folder, const Config& config,
                             std::map<std::string, Origin> origins) {
  Config effective = config;
  effective.output.dir = folder.path;
  effective.output.overwrite = false;
  effective.resume = {};
  origins.erase("output.overwrite");
  origins.erase("resume.residuals"), origins.erase("resume.data");
  return std::string(kConfigTitle) + " 'train config.yaml output.dir=OTHER' repeats the run.\n" +
         dump_yaml(effective, false, origins, keys_without_use(effective));
}

}  // namespace

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return buffer;
}

std::vector<std::string> run_files(const RunDirectory& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  if (!is_run(folder)) return paths;
  for (const auto& entry : fs::directory_iterator(folder.path, error)) {
    const std::string name = entry.path().filename().string();
    // A user may keep files beside the checkpoints; the folder goes where nothing is left in it.
    if (name == "checkpoints" && fs::is_directory(entry.symlink_status()))
      for (const auto& inside : fs::directory_iterator(entry.path(), error))
        if (is_checkpoint_name(inside.path().filename().string())) paths.push_back(inside.path().string());
    if (has_run_name(name) && name != kEnvironmentFile) paths.push_back(entry.path().string());
  }
  paths.push_back(folder.path + "/" + kEnvironmentFile);
  return paths;
}

void rewrite_config(const RunDirectory& folder, const Config& config,
                    const std::map<std::string, Origin>& origins) {
  write_file(folder.path + "/config.yaml", effective_config(folder, config, origins));
}

void keep_config_effective(const RunDirectory& folder, const Config& config,
                           const std::map<std::string, Origin>& origins) {
  const LoadedConfig was = load_config(folder.path + "/config.yaml", {});
  const bool same = std::ranges::all_of(config_keys(), [&](const Key& key) {
    if (key.secret) return key_value(key, was.config) == key_value(key, Config());  // of an earlier version
    return key.name.starts_with("output.") || key.name.starts_with("resume.") ||
           key_value(key, was.config) == key_value(key, config);
  });
  if (!same) rewrite_config(folder, config, origins);
}

RunDirectory open_run_directory(const std::string& path) {
  RunDirectory folder{path};
  folder.lock = std::make_shared<RunLock>(path);
  std::vector<fs::path> half;  // of a start that was killed
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path, error))
    if (const std::string name = entry.path().filename().string();
        name.find(".part-") != name.npos && has_run_name(name))
      half.push_back(entry.path());
  for (const fs::path& file : half) fs::remove(file, error);
  return folder;
}

RunDirectory create_run_directory(const LoadedConfig& loaded, const std::vector<std::string>& command_line,
                                  const std::map<std::string, std::string>& libraries) {
  const Config& config = loaded.config;
  RunDirectory folder{run_directory_name(config)};
  std::error_code error;
  // Nothing is left behind in a folder that is refused.
  if (!fs::exists(folder.path + "/" + RunLock::kName, error)) {
    check_free(folder, config.output.overwrite);
    fs::create_directories(folder.path, error);
    if (error)
      throw UserError("output.dir: " + folder.path + " cannot be created: " + error.message() +
                      "; choose another folder");
  }
  folder.lock = std::make_shared<RunLock>(folder.path);
  check_free(folder, config.output.overwrite);
  for (const std::string& path : run_files(folder)) {
    if (path != folder.checkpoints())
      fs::remove_all(path, error);
    else if (fs::remove(path, error); error == std::errc::directory_not_empty)
      continue;  // a user's files
    if (error) throw UserError("output.overwrite: " + path + " cannot be removed: " + error.message());
  }
  write_file(folder.path + "/" + kEnvironmentFile, environment_json(config, command_line, libraries));
  write_file(folder.path + "/config.yaml", effective_config(folder, config, loaded.origins));
  return folder;
}

}  // namespace topknot
