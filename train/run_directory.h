#pragma once
// The directory of a run: config.yaml (effective, re-runnable), environment.json (where and how it ran),
// metrics.jsonl, metrics.csv, and where asked for gradients.npy, layer_density.json and exchange_profile.json.
// Made by rank 0 before training begins.

#include <map>
#include <string>
#include <vector>

#include "train/config/config.h"

namespace topknot {

struct RunDirectory {
  std::string path;
  std::string metrics_jsonl() const { return path + "/metrics.jsonl"; }
  std::string metrics_csv() const { return path + "/metrics.csv"; }
  std::string gradients_npy() const { return path + "/gradients.npy"; }
  std::string layer_density_json() const { return path + "/layer_density.json"; }
  std::string trace_json(int rank) const { return path + "/trace_rank" + std::to_string(rank) + ".json"; }
  std::string exchange_profile_json() const { return path + "/exchange_profile.json"; }
};

// Creates output.dir (run_directory_name() where it is empty) and writes config.yaml and environment.json. An
// existing folder is refused, or with output.overwrite its earlier run's files are replaced (only the files
// named above but layer_density.json and exchange_profile.json, which may be this run's input; others stay). Throws UserError: exists, cannot be created or written (with the system's
// reason). `command_line` as given; `libraries` name -> version, as the caller knows them.
RunDirectory create_run_directory(const LoadedConfig& loaded, const std::vector<std::string>& command_line,
                                  const std::map<std::string, std::string>& libraries = {});

// Replaces config.yaml, with the values that a run measured when it started.
void rewrite_config(const RunDirectory& folder, const Config& config,
                    const std::map<std::string, Origin>& origins);

// This program's version and, where it was built from a git tree, its revision ("unknown" otherwise).
std::string program_version();

}  // namespace topknot
