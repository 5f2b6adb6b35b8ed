#include "train/run_directory.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "nn/core/base/check.h"
#include "train/metrics/output_file.h"

#ifndef TOPKNOT_VERSION
#define TOPKNOT_VERSION "0.1.0"
#endif
#ifndef TOPKNOT_REVISION
#define TOPKNOT_REVISION "unknown"
#endif

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

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return buffer;
}

std::string environment_json(const Config& config, const std::vector<std::string>& command_line,
                             const std::map<std::string, std::string>& libraries) {
  nlohmann::ordered_json json;
  char host[256] = "unknown";
  gethostname(host, sizeof host - 1);
  utsname system{};
  uname(&system);
  json["host"] = host;
  json["cpu"] = cpu_name();
  json["cores"] = std::thread::hardware_concurrency();
  json["system"] = std::string(system.sysname) + " " + system.release + " " + system.machine;
  json["compiler"] = __VERSION__;
  json["topknot"] = TOPKNOT_VERSION;
  json["revision"] = TOPKNOT_REVISION;
  json["libraries"] = libraries;
  json["backend"] = config.dist.backend;
  json["ranks"] = config.dist.ranks;
  json["threads_a_rank"] = compute_threads(config);
  json["started"] = now_utc();
  json["command_line"] = command_line;
  // Arguments need not be valid UTF-8.
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// output.overwrite belongs to this start, not to the configuration: repeating the run must not delete
// anything.
std::string effective_config(const RunDirectory& folder, const Config& config,
                             std::map<std::string, Origin> origins) {
  Config effective = config;
  effective.output.dir = folder.path;
  effective.output.overwrite = false;
  origins.erase("output.overwrite");
  return "# The effective configuration: 'train config.yaml output.dir=OTHER' repeats the run.\n" +
         dump_yaml(effective, false, origins);
}

}  // namespace

std::string program_version() {
  return "topknot " TOPKNOT_VERSION " (" TOPKNOT_REVISION ")";
}

void rewrite_config(const RunDirectory& folder, const Config& config,
                    const std::map<std::string, Origin>& origins) {
  write_file(folder.path + "/config.yaml", effective_config(folder, config, origins));
}

RunDirectory create_run_directory(const LoadedConfig& loaded, const std::vector<std::string>& command_line,
                                  const std::map<std::string, std::string>& libraries) {
  const Config& config = loaded.config;
  RunDirectory folder{run_directory_name(config)};
  std::error_code error;
  if (fs::exists(folder.path, error)) {
    if (!fs::is_directory(folder.path, error))
      throw UserError("output.dir: " + folder.path + " is a file, not a folder; choose another name");
    if (!config.output.overwrite && !fs::is_empty(folder.path, error))
      throw UserError("output.dir: " + folder.path +
                      " already holds something, and a run is never overwritten silently; choose another "
                      "output.dir, or output.overwrite=true to replace the earlier run");
    for (const char* name :
         {"config.yaml", "environment.json", "metrics.jsonl", "metrics.csv", "gradients.npy"})
      fs::remove(fs::path(folder.path) / name, error);
    for (int rank = 0; fs::remove(folder.trace_json(rank), error); ++rank) {
    }
  } else {
    error.clear();
    fs::create_directories(folder.path, error);
    if (error)
      throw UserError("output.dir: " + folder.path + " cannot be created: " + error.message() +
                      "; choose another folder");
  }
  write_file(folder.path + "/config.yaml", effective_config(folder, config, loaded.origins));
  write_file(folder.path + "/environment.json", environment_json(config, command_line, libraries));
  return folder;
}

}  // namespace topknot
