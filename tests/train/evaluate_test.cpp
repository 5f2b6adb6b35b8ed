#include "train/evaluate.h"

#include <atomic>
#include <csignal>
#include <filesystem>

#include "nn/base/program.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"
#include "tests/train/broken_sample.h"
#include "tests/train/resumed_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

std::atomic<int> reads{0};  // of the test split's first sample
int stop_at_read = 0;       // this one asks the process to stop; 0: none does

// A sound data set.
class StoppingTest final : public Dataset {
 public:
  explicit StoppingTest(Split split) : test_(split == Split::test) {}
  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return data_.size(); }
  Shape sample_shape() const override { return data_.sample_shape(); }
  int classes() const override { return data_.classes(); }
  std::int32_t label(std::int64_t index) const override { return data_.label(index); }
  void get(std::int64_t index, float* sample) const override {
    if (test_ && index == 0 && ++reads == stop_at_read) raise(SIGUSR1);
    data_.get(index, sample);
  }

 private:
  std::string name_ = "stopping_test";
  bool test_;
  BrokenSample data_{Split::test};
};
const RegisterDataset stopping_test("stopping_test", "of the tests", [](const DatasetOptions&, Split split) {
  return std::unique_ptr<Dataset>(std::make_unique<StoppingTest>(split));
});

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
  install_stop_handlers();
  const RunOutcome first = start(temp, keys, false);
  CHECK(first.stopped);
  CHECK(first.stop_signal == SIGUSR1);
  CHECK(first.result == "");
  const Metrics stopped = read_metrics(temp.at("run/metrics.jsonl"));
  CHECK(stopped.steps.size() == 4);
  CHECK(stopped.evals.empty());
  REQUIRE(stopped.stop);
  CHECK(stopped.stop->reason == "SIGUSR1");
  install_stop_handlers();  // forgets the signal
  stop_at_read = 0;
  const RunOutcome second = start(temp, keys, true);
  for (const int signal : kStopSignals) std::signal(signal, SIG_DFL);
  CHECK(second.parameter_checksum == undisturbed.checksum);
  const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
  REQUIRE(metrics.evals.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(metrics.evals[i].step == undisturbed.metrics.evals[i].step);
    CHECK(metrics.evals[i].test.loss == undisturbed.metrics.evals[i].test.loss);
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
