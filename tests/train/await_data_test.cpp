// A stop signal while a rank waits for data that do not come.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <sstream>
#include <thread>

#include "nn/base/program.h"
#include "tests/dist/ranks.h"
#include "tests/support/catch.h"
#include "tests/train/broken_sample.h"
#include "tests/train/resumed_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

std::atomic<int> training_reads{0};
int hang_at = 0;               // this read of a training sample hangs; 0: none does
std::string wait_for_stop_in;  // until the run in this folder has stopped, or for half a minute

// A sound data set.
class HangingTraining final : public Dataset {
 public:
  explicit HangingTraining(Split split) : training_(split == Split::train) {}
  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return data_.size(); }
  Shape sample_shape() const override { return data_.sample_shape(); }
  int classes() const override { return data_.classes(); }
  bool add_to(Checksum&) const override { return true; }  // reads nothing
  std::int32_t label(std::int64_t index) const override { return data_.label(index); }
  void get(std::int64_t index, float* sample) const override {
    if (training_ && ++training_reads == hang_at) hang();
    data_.get(index, sample);
  }

 private:
  static void hang() {
    kill(getpid(), SIGUSR1);
    for (int i = 0; i < 1500; ++i) {
      std::ostringstream text;
      text << std::ifstream(wait_for_stop_in + "/metrics.jsonl").rdbuf();
      if (text.str().find("\"event\":\"stop\"") != std::string::npos) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  std::string name_ = "hanging_training";
  bool training_;
  BrokenSample data_{Split::test};
};
const RegisterDataset hanging_training("hanging_training", "of the tests",
                                       [](const DatasetOptions&, Split split) {
                                         return std::unique_ptr<Dataset>(
                                             std::make_unique<HangingTraining>(split));
                                       });

}  // namespace

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
      install_stop_handlers();
      const RunOutcome first = start(temp, of_ranks, false);
      install_stop_handlers();  // forgets the signal
      hang_at = 0;
      CHECK(first.stopped);
      CHECK(first.stop_signal == SIGUSR1);
      const Metrics stopped = read_metrics(temp.at("run/metrics.jsonl"));
      CHECK(stopped.steps.size() < 20);
      REQUIRE(stopped.stop);
      CHECK_FALSE(stopped.stop->failed);
      const RunOutcome second = start(temp, of_ranks, true);
      for (const int signal : kStopSignals) std::signal(signal, SIG_DFL);
      CHECK(second.parameter_checksum == undisturbed.checksum);
    }
  }
}

TEST_CASE("a rank that has a stop signal ends before the others give up on it") {
  using std::chrono::milliseconds;
  Config config;
  CHECK(stop_patience(config, milliseconds(5000)) == milliseconds(5000));
  config.dist.timeout_s = 5;
  CHECK(stop_patience(config, milliseconds(5000)) == milliseconds(2500));
  CHECK(stop_patience(config, milliseconds(1000)) == milliseconds(1000));
  config.dist.timeout_s = 0;  // never
  CHECK(stop_patience(config, milliseconds(5000)) == milliseconds(5000));
}
