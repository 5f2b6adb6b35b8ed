#pragma once
// From a configuration to running ranks, shared by all programs that train.

#include <chrono>
#include <functional>

#include "dist/launch/launch.h"
#include "train/config/config.h"
#include "train/setup.h"

namespace topknot {

// Section `dist` as launch options. A default dist.ranks leaves the number to the launcher; one on the
// command line must agree with it.
DistOptions dist_options(const LoadedConfig& loaded);

// dist.backend: auto by what serves the run, in `loaded`; logged by rank 0. `host`: the group of a process,
// over which this is collective; null for threads. Another backend stays as it is.
void settle_backend(LoadedConfig& loaded, const LaunchPlan& plan, Communicator* host);

// The functions that a program runs around and on its ranks; each may throw.
struct StartHooks {
  // Every rank that is a process, after it has joined its group and before anything else; may be empty.
  std::function<void(Communicator&)> joined = {};
  // Once per process, also in one that only starts copies of itself: loads what check and body need.
  std::function<void()> load;
  // Validates: once, or under a launcher in the process of each rank. Then the run directory is made, once;
  // under a launcher by rank 0, for which the others wait in body's first collective.
  std::function<void()> check, make_directory;
  // Every rank.
  std::function<void(Communicator&)> body;
  // In place of all but load(): a rank that joins a run which goes on.
  std::function<void()> join = {};
};

// Runs body on all ranks of this process: threads, one rank of several processes, or none if it starts copies
// of itself, whose exit code is then returned. Else 0. Throws what the hooks throw, after the other ranks
// have been notified.
int start_ranks(const LaunchPlan& plan, const DistOptions& options, char* const* argv,
                const StartHooks& hooks);

// load_config(), completed by adopt_architecture().
LoadedConfig load_run_config(const std::string& file, const std::vector<std::string>& overrides);

// The configuration of a run that is to be resumed: config.yaml of its directory, with the overrides. Throws
// UserError where there is none, and for an override of output.dir.
LoadedConfig load_resumed_config(const std::string& run, const std::vector<std::string>& overrides);

// Bytes of the training batches that a rank makes ahead.
double batches_bytes(const Config& config, const Dataset& data);

// Bytes of a rank's weights, gradients, residuals (or their room) and moments in host memory; 0 with a GPU.
double model_bytes(const Config& config, const Dataset& data);

// Throws UserError if `ranks` ranks in `processes` processes (1, or one per rank) need more memory or threads
// than this machine gives at all, or more address space than ulimit leaves a process, with the keys to lower.
// Counts only what is known before the first step: samples, batches, the model, and the stacks of threads.
void check_limits(const Config& config, const RunData& data, int ranks, int processes);

struct RunOutcome {
  int stop_signal = 0;   // the signal that stopped the run on all ranks; 0: none
  bool stopped = false;  // before its end, by a signal or train.stop_after: metrics have no `end` record
  double test_accuracy = 0, test_loss = 0;
  std::string parameter_checksum;  // 16 hexadecimal digits
  std::string result;              // rank 0's, of a run that came to its end: lines for standard output
};

// The whole of training, the same code for every rank of every backend (train/trainer.cpp): trains to the
// end, or until a signal or train.stop_after asks for a stop. Collective. Throws on any error; the caller
// tells the peers.
RunOutcome run_rank(const RunInputs& inputs, Communicator& communicator);

// Trains as `loaded` says, which must have passed check_config(); `argv` is repeated in environment.json and
// by copies of this process. Returns the exit code: 0, that of a copy, or 128 + the signal of a stop.
int start_training(LoadedConfig loaded, int argc, char* const* argv, bool quiet, bool resume,
                   std::chrono::steady_clock::time_point program_start);
// `train --coordinate` of a HOST:PORT, for ranks that this configuration trains. Returns the run's exit code.
int start_coordinator(const LoadedConfig& loaded, const std::string& where);

}  // namespace topknot
