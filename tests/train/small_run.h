#pragma once
// A small training run on several ranks, as the tests of train compare them.

#include "tests/dist/ranks.h"
#include "train/metrics/metrics.h"
#include "train/start.h"

namespace topknot::testing {

using Keys = std::vector<std::string>;

inline Keys with(Keys keys, const Keys& more, const Keys& last = {}) {
  keys.insert(keys.end(), more.begin(), more.end());
  keys.insert(keys.end(), last.begin(), last.end());
  return keys;
}

// What a small run of this method needs; sums in rank order, for the same bits on every backend.
inline Keys keys_of_method(const std::string& method) {
  const Keys keys{"compress.name=" + method, "dist.ordered_sum=true"};
  if (method == "threshold") return with(keys, {"compress.threshold=0.01"});
  if (method == "powersgd" || method == "acpsgd")
    return with(keys, {"compress.rank=2", "compress.min_compression=1"});
  if (method == "lags")
    return with(keys, {"compress.scope=tensor", "compress.lr_inside=true", "optimizer.momentum=0"});
  return keys;
}

struct Run {
  std::vector<std::string> checksums;  // by rank
  double test_loss = 0, test_accuracy = 0;
  Metrics metrics;
};

inline LoadedConfig small_run(const TempFolder& temp, const std::vector<std::string>& overrides) {
  const Keys all{"model.name=mlp",       "model.hidden=[24]",     "data.train_size=512",
                 "data.test_size=64",    "data.batch_size=4",     "train.max_steps=50",
                 "train.epochs=100",     "train.eval_every=0",    "train.check_every=1",
                 "optimizer.lr=0.02",    "compress.density=0.01", "compress.warmup=[0.05]",
                 "train.log_every=1000", "output.overwrite=true", "output.dir=" + temp.at("run")};
  LoadedConfig loaded = load_config("", with(all, overrides));
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config));
  return loaded;
}

// Runs a configuration in its directory, or goes on in `resumed`; every rank's outcome. `gpus`: which the
// ranks use in turn, where they compute on GPUs.
inline std::vector<RunOutcome> outcomes_of(const LoadedConfig& loaded, const std::string& backend = "threads",
                                           int gpus = 1,
                                           const std::optional<RunDirectory>& resumed = std::nullopt,
                                           const RanksOptions& options = {}) {
  const RunData data = load_data(loaded.config);
  RunInputs inputs{loaded.config, data, resumed ? *resumed : create_run_directory(loaded, {}), true,
                   std::chrono::steady_clock::now()};
  inputs.resume = resumed.has_value();
  std::vector<RunOutcome> outcomes(loaded.config.dist.ranks);
  run_ranks(backend, loaded.config.dist.ranks, options, [&](Communicator& communicator) {
    RunInputs mine = inputs;
    mine.gpu = communicator.rank() % gpus;
    outcomes[communicator.rank()] = run_rank(mine, communicator);
  });
  return outcomes;
}

inline Metrics metrics_of(const TempFolder& temp) {
  return read_metrics(temp.at("run/metrics.jsonl"));
}

// The model and data of a configuration, without a run.
struct Prepared {
  TempFolder temp;
  LoadedConfig loaded;
  RunData data;
  std::unique_ptr<BuiltModel> model;
  explicit Prepared(const Keys& keys)
      : loaded(small_run(temp, keys)),
        data(load_data(loaded.config)),
        model(build_model(loaded.config, *data.train)) {}
  const ParameterArena& arena() const { return model->store.arena(); }
};

// A copy of the run in another folder's run.
struct RunCopy : TempFolder {
  explicit RunCopy(const TempFolder& from) {
    fs::copy(from.at("run"), at("run"), fs::copy_options::recursive);
  }
};

// Rank 0's outcome.
inline RunOutcome run_in_directory(const LoadedConfig& loaded, const std::string& backend = "threads") {
  return outcomes_of(loaded, backend).front();
}

// The ranks' parameters are compared after every step on the way (train.check_every=1).
inline Run train(const std::string& backend, int ranks, std::vector<std::string> overrides, int gpus = 1) {
  const TempFolder temp;
  overrides.push_back("dist.ranks=" + std::to_string(ranks));
  const std::vector<RunOutcome> outcomes = outcomes_of(small_run(temp, overrides), backend, gpus);
  Run run;
  for (const RunOutcome& outcome : outcomes) {
    run.checksums.push_back(outcome.parameter_checksum);
    CHECK(outcome.parameter_checksum == outcomes[0].parameter_checksum);
  }
  run.test_loss = outcomes[0].test_loss, run.test_accuracy = outcomes[0].test_accuracy;
  run.metrics = metrics_of(temp);
  return run;
}

}  // namespace topknot::testing
