#pragma once
// A small training run on several ranks, as the tests of train compare them.

#include <string>
#include <vector>

#include "nn/base/check.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "train/metrics/metrics.h"
#include "train/trainer.h"

namespace topknot::testing {

using Keys = std::vector<std::string>;

// What a small run of this method needs; sums in rank order, for the same bits on every backend.
inline Keys keys_of_method(const std::string& method) {
  Keys keys{"compress.name=" + method, "dist.ordered_sum=true"};
  if (method == "threshold") keys.push_back("compress.threshold=0.01");
  if (method == "powersgd" || method == "acpsgd")
    keys.insert(keys.end(), {"compress.rank=2", "compress.min_compression=1"});
  if (method == "lags")
    keys.insert(keys.end(), {"compress.scope=tensor", "compress.lr_inside=true", "optimizer.momentum=0"});
  return keys;
}

struct Run {
  std::vector<std::string> checksums;  // by rank
  double test_loss = 0, test_accuracy = 0;
  Metrics metrics;
};

inline LoadedConfig small_run(const TempFolder& temp, const std::vector<std::string>& overrides) {
  std::vector<std::string> all{
      "model.name=mlp",       "model.hidden=[24]",     "data.train_size=512",
      "data.test_size=64",    "data.batch_size=4",     "train.max_steps=50",
      "train.epochs=100",     "train.eval_every=0",    "train.check_every=1",
      "optimizer.lr=0.02",    "compress.density=0.01", "compress.warmup=[0.05]",
      "train.log_every=1000", "output.overwrite=true", "output.dir=" + temp.at("run")};
  all.insert(all.end(), overrides.begin(), overrides.end());
  LoadedConfig loaded = load_config("", all);
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config));
  return loaded;
}

// Runs a configuration in its directory; rank 0's outcome.
inline RunOutcome run_in_directory(const LoadedConfig& loaded, const std::string& backend = "threads") {
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  RunOutcome result;
  run_ranks(backend, loaded.config.dist.ranks, [&](Communicator& communicator) {
    const RunOutcome outcome = run_rank(inputs, communicator);
    if (communicator.rank() == 0) result = outcome;
  });
  return result;
}

// The ranks' parameters are compared after every step on the way (train.check_every=1).
// `gpus`: which the ranks use in turn, where they compute on GPUs.
inline Run train(const std::string& backend, int ranks, std::vector<std::string> overrides, int gpus = 1) {
  const TempFolder temp;
  overrides.push_back("dist.ranks=" + std::to_string(ranks));
  const LoadedConfig loaded = small_run(temp, overrides);
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  Run run;
  run.checksums.resize(static_cast<std::size_t>(ranks));
  run_ranks(backend, ranks, [&](Communicator& communicator) {
    RunInputs mine = inputs;
    mine.gpu = communicator.rank() % gpus;
    const RunOutcome outcome = run_rank(mine, communicator);
    run.checksums[static_cast<std::size_t>(communicator.rank())] = outcome.parameter_checksum;
    if (communicator.rank() == 0)
      run.test_loss = outcome.test_loss, run.test_accuracy = outcome.test_accuracy;
  });
  run.metrics = read_metrics(temp.at("run/metrics.jsonl"));
  for (const std::string& checksum : run.checksums) CHECK(checksum == run.checksums[0]);
  return run;
}

}  // namespace topknot::testing
