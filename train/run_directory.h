#pragma once
// The directory of a run: config.yaml (effective, re-runnable), environment.json (where and how it ran),
// metrics.jsonl, metrics.csv, and if asked for gradients.safetensors, layer_density.json,
// exchange_profile.json, auto_profiles.json and checkpoints. Made by rank 0 before training begins, and held
// by one process at a time (RunLock).

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nn/base/file.h"
#include "train/config/config.h"

namespace topknot {

// One process at a time writes a run directory: it holds an flock on the file run.lock in there, which names
// it. The kernel releases the lock when the process and the ranks that it started have ended, however they
// did. A lock whose file was deleted, moved or replaced keeps nobody out: its holder looks for it whenever it
// writes.
class RunLock {
 public:
  // Throws UserError: the process that holds the directory, why the file cannot be made, or that what has its
  // name is no run's lock (a link, a file with other content), which stays as it is. If a file system has no
  // locks it warns and goes on. Waits up to 10 s for the ranks of a process that has died.
  explicit RunLock(const std::string& directory);
  // For a rank: the lock that the process which started it holds for it. Throws UserError if it holds none
  // any more.
  static RunLock of_parent(const std::string& directory);
  // For a rank whose run goes on without the one that held the lock: if that process hangs, it loses the lock.
  static RunLock of_lost_rank(const std::string& directory);

  // Throws UserError if the file is no longer the one that is held.
  void check() const;

  static constexpr const char* kName = "run.lock";

 private:
  RunLock(std::string path, Fd file) : path_(std::move(path)), file_(std::move(file)) {}
  bool in_place() const;

  std::string path_;
  Fd file_;
};

// The process that runs in this directory, "process 4242 on node1"; "" if none does.
std::string running_process(const std::string& directory);

struct RunDirectory {
  std::string path;
  std::string metrics_jsonl() const { return path + "/metrics.jsonl"; }
  std::string metrics_csv() const { return path + "/metrics.csv"; }
  std::string gradients_safetensors() const { return path + "/gradients.safetensors"; }
  std::string layer_density_json() const { return path + "/layer_density.json"; }
  std::string trace_json(int rank) const { return path + "/trace_rank" + std::to_string(rank) + ".json"; }
  std::string choices_json() const { return path + "/choices.json"; }
  std::string exchange_profile_json() const { return path + "/exchange_profile.json"; }
  std::string auto_profiles_json() const { return path + "/auto_profiles.json"; }
  std::string checkpoints() const { return path + "/checkpoints"; }  // a folder

  // Throws UserError if the directory is no longer this run's (RunLock::check()).
  std::function<void()> check() const {
    return [held = lock] {
      if (held) held->check();
    };
  }

  // Throws UserError if the directory has gradients of Topknot 0.1.
  void check_gradients() const;

  std::shared_ptr<const RunLock> lock = nullptr;  // while a copy lives, no other process writes here
};

// The files and folders that output.overwrite removes, as paths in this order: those that a run wrote,
// temporary ones of killed runs included; not layer_density.json and exchange_profile.json, which may be the
// new run's input, and of checkpoints only those with a checkpoint's name. Empty if the folder is no run's,
// whatever names its files have: a run's has an environment.json of a run and no other config.yaml than a
// run's.
std::vector<std::string> run_files(const RunDirectory& folder);

// Creates and locks output.dir (run_directory_name() if it is empty) and writes config.yaml and
// environment.json. An existing folder that holds anything is refused, or with output.overwrite the earlier
// run's files are replaced; files that are not a run's stay. Throws UserError: exists, a run is running
// there, holds foreign files of these names, cannot be created or written (with the system's reason).
// `command_line` as given; `libraries` name -> version, as the caller knows them.
RunDirectory create_run_directory(const LoadedConfig& loaded, const std::vector<std::string>& command_line,
                                  const std::map<std::string, std::string>& libraries = {});

// Locks the directory of a run that is to be resumed, and removes the files that a killed start left half
// written. Throws UserError if a run is running there.
RunDirectory open_run_directory(const std::string& path);

// Replaces config.yaml, with the values that a run measured when it started.
void rewrite_config(const RunDirectory& folder, const Config& config,
                    const std::map<std::string, Origin>& origins);

// Calls rewrite_config() if a resumed run has other values than config.yaml; else keeps the file's origins.
void keep_config_effective(const RunDirectory& folder, const Config& config,
                           const std::map<std::string, Origin>& origins);

std::string now_utc();  // 2026-11-22T03:50:00Z

// The text of `train status RUN`, one line each, while the run goes on or afterwards: the run; whether it is
// running, finished, stopped, failed (with the error) or was killed; steps, loss; throughput of the last
// steps and the time left; the last evaluation; the last checkpoint. UserError if `run` is no run directory.
std::string status_text(const std::string& run);

// `train status RUN`, from "status" on. Prints status_text(); returns the exit code.
int status_command(int argc, const char* const* argv);

}  // namespace topknot
