#pragma once
// From a configuration to running ranks, shared by all programs that train.

#include <chrono>
#include <functional>

#include "dist/launch/launch.h"
#include "train/config/config.h"

namespace topknot {

// Section `dist` as launch options. A default dist.ranks leaves the number to the launcher; one on the command line
// must agree with it.
DistOptions dist_options(const LoadedConfig& loaded);

// dist.backend: auto by what serves the run, in `loaded`; logged by rank 0. `host`: the group of a process, over which
// this is collective; null for threads. Another backend stays as it is.
void settle_backend(LoadedConfig& loaded, const LaunchPlan& plan, Communicator* host);

// What a program runs around and on its ranks; every function may throw.
struct StartHooks {
  // Every rank that is a process, after it has joined its group and before anything else; may be empty.
  std::function<void(Communicator&)> joined = {};
  // Once per process that runs ranks, before it starts any: loads what they need.
  std::function<void()> load;
  // Once per run, before the first rank begins: validates, then makes the run directory.
  std::function<void()> check, make_directory;
  // Every rank.
  std::function<void(Communicator&)> body;
};

// Runs body on all ranks of this process: threads, one rank of several processes, or none where it starts copies of
// itself, whose exit code is then returned. Else 0. Throws what the hooks throw, after the other ranks have been
// notified.
int start_ranks(const LaunchPlan& plan, const DistOptions& options, char* const* argv,
                const StartHooks& hooks);

// The configuration of a run that is to be resumed: config.yaml of its directory, with the overrides. Throws UserError
// where there is none, and for an override of output.dir.
LoadedConfig load_resumed_config(const std::string& run, const std::vector<std::string>& overrides);

// Trains as `loaded` says, which must have passed check_config(); `argv` is repeated in environment.json and
// by copies of this process. Returns the exit code: 0, that of a copy, or 128 + the signal that stopped the
// run.
int start_training(LoadedConfig loaded, int argc, char* const* argv, bool quiet, bool resume,
                   std::chrono::steady_clock::time_point program_start);

}  // namespace topknot
