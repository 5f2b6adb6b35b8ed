#include "train/evaluate.h"

#include <unistd.h>
#include <csignal>

#include "nn/base/program.h"
#include "tests/train/broken_sample.h"
#include "tests/train/resumed_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

std::atomic<int> reads{0};  // of the test split's first sample
int stop_at_read = 0;       // this one asks the process to stop; 0: none does

// A sound data set, as that of a test split is.
class StoppingTest final : public BrokenSample {
 public:
  explicit StoppingTest(Split split)
      : BrokenSample(Split::test, "stopping_test"), test_(split == Split::test) {}
  void get(std::int64_t index, float* sample) const override {
    if (test_ && index == 0 && ++reads == stop_at_read) raise(SIGUSR1);
    BrokenSample::get(index, sample);
  }

 private:
  bool test_;
};
const bool stopping_test_registered = add_test_dataset<StoppingTest>("stopping_test");

std::atomic<int> training_reads{0};
int hang_at = 0;               // this read of a training sample hangs; 0: none does
std::string wait_for_stop_in;  // until the run in this folder has stopped, or for half a minute

// A sound data set too.
class HangingTraining final : public BrokenSample {
 public:
  explicit HangingTraining(Split split)
      : BrokenSample(Split::test, "hanging_training"), training_(split == Split::train) {}
  bool add_to(Checksum&) const override { return true; }  // reads nothing
  void get(std::int64_t index, float* sample) const override {
    if (training_ && ++training_reads == hang_at) hang();
    BrokenSample::get(index, sample);
  }

 private:
  static void hang() {
    kill(getpid(), SIGUSR1);
    for (int i = 0; i < 1500; ++i) {
      if (contains(text_of(wait_for_stop_in + "/metrics.jsonl"), "\"event\":\"stop\"")) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  bool training_;
};
const bool hanging_training_registered = add_test_dataset<HangingTraining>("hanging_training");

// What a run leaves that SIGUSR1 stops; the signal is forgotten.
Metrics stopped_by_signal(const TempFolder& temp, const Keys& keys) {
  install_stop_handlers();
  const RunOutcome outcome = start(temp, keys, false);
  install_stop_handlers();
  for (const int signal : kStopSignals) std::signal(signal, SIG_DFL);
  CHECK(outcome.stopped);
  CHECK(outcome.stop_signal == SIGUSR1);
  CHECK(outcome.result == "");
  const Metrics metrics = metrics_of(temp);
  REQUIRE(metrics.stop);
  return metrics;
}

}  // namespace

TEST_CASE("a signal ends an evaluation on all ranks, and the next start makes it: the same run as without") {
  const Keys keys{"data.name=stopping_test", "data.batch_size=2", "dist.ranks=2", "train.max_steps=8",
                  "train.eval_every=0.5"};  // after steps 4 and 8
  const Ended undisturbed = whole(keys);
  REQUIRE(undisturbed.metrics.evals.size() == 2);
  // Each evaluation reads it once; what comes before them compares the ranks' data.
  stop_at_read = reads - 2 + 1;
  reads = 0;
  const TempFolder temp;
  const Metrics stopped = stopped_by_signal(temp, keys);
  stop_at_read = 0;
  CHECK(stopped.steps.size() == 4);
  CHECK(stopped.evals.empty());
  CHECK(stopped.stop->reason == "SIGUSR1");
  const Ended resumed = ended(temp, start(temp, keys, true));
  CHECK(resumed.checksum == undisturbed.checksum);
  REQUIRE(resumed.metrics.evals.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    const EvalRecord &a = resumed.metrics.evals[i], &b = undisturbed.metrics.evals[i];
    CHECK(a.step == b.step);
    CHECK(a.test.loss == b.test.loss);
  }
}

TEST_CASE("running statistics become the ranks' mean, or rank 0's, or stay as they are") {
  using Values = std::vector<float>;
  for (const auto& [rule, expected] :
       {std::pair<std::string, std::vector<Values>>{"mean", {{2, 4}, {2, 4}, {2, 4}}},
        {"rank0", {{1, 2}, {1, 2}, {1, 2}}},
        {"local", {{1, 2}, {2, 4}, {3, 6}}}}) {
    std::vector<Values> values(3);
    run_ranks("threads", 3, [&, rule = rule](Communicator& communicator) {
      const auto rank = static_cast<std::size_t>(communicator.rank());
      ParameterStore store;
      store.add_buffer("mean", 1, static_cast<float>(rank + 1));
      store.add_buffer("variance", 1, static_cast<float>(2 * rank + 2));
      CollectiveQueue queue(communicator);
      synchronize_statistics(store, rule, queue, communicator);
      for (const auto& buffer : store.buffers()) values[rank].push_back(buffer->values[0]);
    });
    INFO(rule);
    CHECK(values == expected);
  }
}

TEST_CASE("a rank that waits for data stops with the others, after their last common step, and saves it") {
  const Keys keys{"data.name=hanging_training", "data.batch_size=2",  "data.workers=1",
                  "train.max_steps=20",         "train.eval_every=0", "train.checkpoint_every=0"};
  for (const int ranks : {1, 2}) {
    const Keys of_ranks = with(keys, {"dist.ranks=" + std::to_string(ranks)});
    const Ended undisturbed = whole(of_ranks);
    // At the begin of an epoch of 32 samples, of the first one too, and within one.
    for (const int hang : {1, 15, 33}) {
      INFO(ranks << " ranks, read " << hang);
      const TempFolder temp;
      training_reads = 0, hang_at = hang, wait_for_stop_in = temp.at("run");
      const Metrics stopped = stopped_by_signal(temp, of_ranks);
      hang_at = 0;
      CHECK(stopped.steps.size() < 20);
      CHECK_FALSE(stopped.stop->failed);
      CHECK(start(temp, of_ranks, true).parameter_checksum == undisturbed.checksum);
    }
  }
}

TEST_CASE("a rank that has a stop signal ends before the others give up on it") {
  using std::chrono::milliseconds;
  const auto patience = [](double timeout_s, int most) {
    Config config;
    if (timeout_s >= 0) config.dist.timeout_s = timeout_s;
    return stop_patience(config, milliseconds(most));
  };
  CHECK(patience(-1, 5000) == milliseconds(5000));  // the default
  CHECK(patience(5, 5000) == milliseconds(2500));
  CHECK(patience(5, 1000) == milliseconds(1000));
  CHECK(patience(0, 5000) == milliseconds(5000));  // never
}
