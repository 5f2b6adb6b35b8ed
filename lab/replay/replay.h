#pragma once
// Recorded gradients through the exchange alone, without forward and backward pass and without optimizer: a
// machine that cannot train 16 ranks can still measure how long 16 ranks take to encode, exchange and decode.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "dist/exchange/exchange.h"
#include "train/checkpoint/safetensors.h"
#include "train/config/config.h"
#include "train/metrics/metrics.h"
#include "train/setup.h"

namespace topknot {

// Gradients of a run, as train.record_gradients leaves them in its folder: config.yaml, and
// gradients.safetensors with rank 0's own gradients of some steps, in the order of that run's arena. Read row
// by row when they are asked for, so a recording may be larger than memory.
class Recording {
 public:
  // Throws UserError: no such folder, nothing recorded in it, a damaged file, or one that does not fit the
  // model of config.yaml. Of the data set its shape is needed, so its test files must be where the run found
  // them (synthetic sets need none).
  explicit Recording(const std::string& folder);

  const Config& config() const { return config_; }  // of the run
  std::int64_t steps() const { return steps_; }     // recorded
  std::size_t size() const { return size_; }        // elements of a gradient

  // The run's model, its parameters laid out as `config` has it, which may differ in what is compressed.
  std::unique_ptr<BuiltModel> model(const Config& config) const;
  // Puts `scale` times a recorded gradient (`step` from 0) into the gradients of a model's arena, whatever
  // its order. Throws UserError if the file cannot be read.
  void fill(ParameterArena& arena, std::int64_t step, float scale) const;

 private:
  std::string folder_;
  Config config_;
  std::unique_ptr<Dataset> data_;
  std::unique_ptr<GradientsReader> reader_;
  std::int64_t steps_ = 0;
  std::size_t size_ = 0;
  std::map<std::string, std::size_t> offsets_;  // of the parameters in a recorded gradient
};

struct ReplayOptions {
  std::int64_t steps = 20;  // that count; kWarmUpSteps go before them
  // Seconds that a rank sleeps in each step in place of a backward pass, each parameter's share by its
  // elements: groups then leave one after the other, and communication can hide. 0: all at once.
  double compute_s = 0;
  // All ranks wait for each other when all have encoded, outside of the times, before the first collective
  // begins: for ranks that share cores, whose collectives would otherwise wait for each other's encoding.
  // Needs a backend whose collectives run concurrently with the compute thread.
  bool meet = false;
  // If train.profile_steps has the ranks write their traces (train/trace.h); "": nowhere.
  std::string trace_folder = {};
};

// Which recorded step rank `rank` of `ranks` takes in `step` (from 0) of a replay, and by what it is
// multiplied: the steps go round, so that no two ranks have the same one where there are enough; the factors
// lie in (0.5, 1.5), differ by rank and have the mean 1.
struct ReplayRow {
  std::int64_t row = 0;
  float scale = 1;
};
ReplayRow replay_row(std::int64_t step, int rank, int ranks, std::int64_t recorded);

// A figure of a step: rank 0's, and the extremes over the ranks.
struct OverRanks {
  double rank0 = 0, least = 0, largest = 0, mean = 0;
};

// One step, seconds and bytes as StepReport has them, of all ranks.
struct ReplayStep {
  OverRanks step_s;  // begin_step() to the end of finish(), what compute_s slept included
  OverRanks encode_s, communicate_s, exposed_s, decode_s, bytes_sent, bytes_received, selected;
  double threshold = 0;  // rank 0's
};

// Those of all ranks by their names in bench.json: seconds, then counts.
struct ReplayFigure {
  const char* key;
  OverRanks ReplayStep::*figure;
};
inline constexpr ReplayFigure kReplayFigures[] = {{"step_s", &ReplayStep::step_s},
                                                  {"encode_s", &ReplayStep::encode_s},
                                                  {"communicate_s", &ReplayStep::communicate_s},
                                                  {"exposed_s", &ReplayStep::exposed_s},
                                                  {"decode_s", &ReplayStep::decode_s},
                                                  {"bytes_sent", &ReplayStep::bytes_sent},
                                                  {"bytes_received", &ReplayStep::bytes_received},
                                                  {"selected", &ReplayStep::selected}};
inline constexpr std::size_t kReplaySeconds = 5;  // of these

struct ReplayResult {
  std::vector<ReplayStep> steps;  // all, those of the warm-up first
  std::size_t groups = 0;
  std::size_t parameters = 0;  // elements of the model
};

// Called after each step, outside of the times.
using ReplayObserver = std::function<void(std::int64_t step, Exchange& exchange, ParameterArena& arena)>;

// One rank's part. Before each step the gradients are put in place and all ranks meet, outside of the times,
// so that they begin together. `config`: the recording's with the changes of the replay
// (check_replay_keys()). Collective; all ranks get the same result. Throws UserError if a recorded gradient
// is not finite.
ReplayResult replay_rank(const Recording& recording, const Config& config, const ReplayOptions& options,
                         Communicator& communicator, const ReplayObserver& observer = {});

// Validates a replay's configuration before a directory is made. Throws UserError.
void check_replay(const Recording& recording, const Config& config);
// Throws UserError for a key=value without effect on a replay: the model, the data and the training are the
// recording's.
void check_replay_keys(const std::vector<std::string>& overrides);

// The files of a replay. `folder` "": none; else metrics.jsonl and metrics.csv (as a run has them;
// seconds are rank 0's, time_s the sum of the steps), and bench.json (medians over the steps that count).
// Throws UserError if it cannot be written.
struct ReplayReport {
  std::string recording;
  std::int64_t recorded_steps = 0;
  Config config;
  std::string backend;
  ReplayOptions options;
};
void write_replay(const std::string& folder, const ReplayReport& report, const ReplayResult& result);
// The medians as a table, for people.
std::string replay_table(const ReplayReport& report, const ReplayResult& result);

}  // namespace topknot
