#pragma once
// run_rank() is the whole of training, the same code for every rank of every backend.

#include <chrono>
#include <map>
#include <string>

#include "dist/comm/communicator.h"
#include "train/run_directory.h"
#include "train/setup.h"

namespace topknot {

// What all ranks of a process share.
struct RunInputs {
  const Config& config;
  const RunData& data;
  RunDirectory folder;  // written by rank 0 only
  bool quiet = false;
  std::chrono::steady_clock::time_point program_start;
  std::map<std::string, Origin> origins = {};  // of the configuration's keys, for config.yaml
  bool resume = false;                         // from the newest checkpoint of `folder`
  int gpu = 0;                                 // index of this process's GPU, where train.device is cuda
};

struct RunOutcome {
  int stop_signal = 0;   // the signal that stopped the run on all ranks; 0: none
  bool stopped = false;  // before its end, by a signal or train.stop_after: metrics have no `end` record
  double test_accuracy = 0, test_loss = 0;
  std::string parameter_checksum;  // 16 hexadecimal digits
  std::string result;              // rank 0's, of a run that came to its end: lines for standard output
};

// Trains to the end, or until a signal or train.stop_after asks for a stop. Collective. Throws on any error; the caller tells the
// peers.
RunOutcome run_rank(const RunInputs& inputs, Communicator& communicator);

}  // namespace topknot
