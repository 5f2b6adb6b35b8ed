#pragma once
// Runs that stop and are resumed, and how they compare with one that does not stop.

#include "tests/train/small_run.h"
#include "train/metrics/run_config.h"
#include "train/start.h"

namespace topknot::testing {

// One start of the run in temp/run; `more` on top of its keys.
inline RunOutcome start(const TempFolder& temp, const Keys& keys, bool resume,
                        const std::string& backend = "threads", int gpus = 1) {
  const LoadedConfig loaded = resume ? load_resumed_config(temp.at("run"), keys) : small_run(temp, keys);
  return outcomes_of(loaded, backend, gpus,
                     resume ? std::optional(RunDirectory{temp.at("run")}) : std::nullopt)
      .front();
}

// What a start throws.
inline std::string start_error(const TempFolder& temp, const Keys& keys, bool resume = true) {
  return error_text([&] { start(temp, keys, resume); });
}

// A run that has stopped after so many steps.
struct StoppedRun : TempFolder {
  StoppedRun(const Keys& keys, int steps) {
    start(*this, with(keys, {"train.stop_after=" + std::to_string(steps)}), false);
  }
};

struct Ended {
  std::string checksum;
  Metrics metrics;
  std::string groups = {};  // exchange.groups as the run planned them; [] where it did not
};

// The run in temp/run as its last start left it.
inline Ended ended(const TempFolder& temp, const RunOutcome& outcome) {
  return {outcome.parameter_checksum, metrics_of(temp),
          RunConfig(temp.at("run/config.yaml")).text("exchange.groups")};
}

inline Ended whole(const Keys& keys, const std::string& backend = "threads", int gpus = 1) {
  const TempFolder temp;
  return ended(temp, start(temp, keys, false, backend, gpus));
}

inline Ended stopped_and_resumed(const Keys& keys, int stop, const std::string& backend = "threads",
                                 int gpus = 1) {
  const TempFolder temp;
  const RunOutcome first =
      start(temp, with(keys, {"train.stop_after=" + std::to_string(stop)}), false, backend, gpus);
  CHECK(first.stopped);
  CHECK(first.stop_signal == 0);
  const RunOutcome second = start(temp, keys, true, backend, gpus);
  CHECK_FALSE(second.stopped);
  return ended(temp, second);
}

// No step stands twice or is missing, and what is no time is the same.
inline void check_same(const Ended& a, const Ended& b) {
  CHECK(a.checksum == b.checksum);
  REQUIRE(a.metrics.steps.size() == b.metrics.steps.size());
  for (std::size_t i = 0; i < a.metrics.steps.size(); ++i) {
    const StepRecord &x = a.metrics.steps[i], &y = b.metrics.steps[i];
    CHECK(y.step == static_cast<std::int64_t>(i) + 1);
    CHECK((x.step == y.step && x.loss == y.loss && x.lr == y.lr && x.density == y.density &&
           x.selected == y.selected && x.bytes_sent == y.bytes_sent));
    if (i > 0) CHECK(y.time_s >= b.metrics.steps[i - 1].time_s);
  }
  const auto losses = [](const Metrics& metrics) {
    std::vector<double> all;
    for (const EpochRecord& epoch : metrics.epochs) all.push_back(epoch.train_loss);
    for (const EvalRecord& eval : metrics.evals) all.push_back(eval.test.loss);
    return all;
  };
  CHECK(losses(a.metrics) == losses(b.metrics));
  REQUIRE((a.metrics.end && b.metrics.end));
  CHECK(a.metrics.end->bytes_sent == b.metrics.end->bytes_sent);
  CHECK(a.metrics.end->steps == b.metrics.end->steps);
  CHECK(a.metrics.end->best_test_accuracy == b.metrics.end->best_test_accuracy);
}

}  // namespace topknot::testing
