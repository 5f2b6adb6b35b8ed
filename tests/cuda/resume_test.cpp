// A run on GPUs that stops and is resumed ends with the bits of one that does not stop.
#include <csignal>
#include <iterator>

#include "compress/compressor.h"
#include "nn/base/program.h"
#include "tests/cuda/fixture.h"
#include "tests/data/made_up_speech.h"
#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"
#include "train/step.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr int kStop = 6;  // in the middle of the second epoch of 4 steps

const Keys kGpuRun{
    "train.device=cuda",      "train.deterministic=true", "train.max_steps=10", "train.stop_after=0",
    "train.check_every=4",    "data.test_size=16",        "data.train_size=32", "data.image_size=12",
    "model.hidden=[12]",      "train.eval_every=0.5",     "dist.ranks=2",       "compress.density=0.1",
    "train.checkpoint_keep=1"};

}  // namespace

TEST_CASE("on GPUs every method goes on bit for bit from the middle of an epoch") {
  for (const std::string& method : compressors().names()) {
    INFO(method);
    Keys keys = with(kGpuRun, keys_of_method(method));
    if (method == "demo")  // its own optimizer, sign, has no kernels
      keys = with(keys, {"optimizer.name=sgd", "optimizer.momentum=0"});
    check_same(whole(keys), stopped_and_resumed(keys, kStop));
  }
}

TEST_CASE("on GPUs local steps go on bit for bit in the middle of a round") {
  for (const Keys& keys : {Keys{"compress.name=dense", "optimizer.name=adamw"}, Keys{"compress.name=topk"},
                           Keys{"compress.name=topk", "model.name=resnet20", "data.batch_size=2",
                                "data.train_size=8", "train.max_steps=4", "data.test_size=4"}}) {
    INFO(keys.back());
    const int stop = keys.size() > 2 ? 3 : 5;
    const Keys local = with(with(kGpuRun, {"exchange.every=4"}), keys);
    check_same(whole(local), stopped_and_resumed(local, stop));
  }
}

TEST_CASE("on GPUs memories, micro-batches, statistics and captured graphs go on bit for bit") {
  for (const Keys& keys :
       {Keys{"compress.name=topk", "compress.memory=dgc", "train.accumulate=2"},
        Keys{"compress.name=topk", "compress.memory=ef21"},
        Keys{"compress.name=dgc", "train.graphs=false", "data.on_device=false"},
        Keys{"compress.name=gaussiank", "data.augment=true", "data.shard=uneven:2"},
        Keys{"compress.name=topk", "optimizer.name=adamw", "schedule.name=plateau"},
        Keys{"compress.name=topk", "model.name=resnet20", "data.batch_size=2", "data.train_size=8",
             "train.max_steps=4", "train.bn_stats=local", "data.test_size=4"}}) {
    INFO(keys[1]);
    const int stop = keys[1] == "model.name=resnet20" ? 3 : kStop;
    check_same(whole(with(kGpuRun, keys)), stopped_and_resumed(with(kGpuRun, keys), stop));
  }
}

TEST_CASE("a signal stops a run on GPUs after the steps that are under way, all of them reported") {
  const Keys keys = with(kGpuRun, {"compress.name=topk", "data.train_size=1024", "train.max_steps=100",
                                   "train.check_every=0", "train.eval_every=0"});
  const TempFolder temp;
  install_stop_handlers();
  std::jthread sender([&](std::stop_token over) {
    const auto reported = [&] {
      std::ifstream file(temp.at("run/metrics.jsonl"));
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      return text.find("\"event\":\"step\"") != std::string::npos;
    };
    while (!over.stop_requested() && !reported()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(getpid(), SIGUSR1);
  });
  const RunOutcome first = start(temp, keys, false);
  sender.request_stop();
  sender.join();
  install_stop_handlers();  // forgets the signal
  CHECK(first.stop_signal == SIGUSR1);
  const std::size_t made = read_metrics(temp.at("run/metrics.jsonl")).steps.size();
  CHECK((made > 16 && made < 100));
  const RunOutcome second = start(temp, keys, true);
  for (const int signal : kStopSignals) std::signal(signal, SIG_DFL);
  check_same(whole(keys), {second.parameter_checksum, read_metrics(temp.at("run/metrics.jsonl")), {}});
}

TEST_CASE("a checkpoint's state on a GPU is its step's, although it comes to the host beside later ones") {
  constexpr float kNotYet = -77;
  for (const std::string method : {"dgc", "topk", "dense"}) {
    INFO(method);
    const TempFolder temp;
    const LoadedConfig loaded = small_run(
        temp, with(with(kGpuRun, keys_of_method(method)), {"dist.ranks=1", "optimizer.momentum=0.9"}));
    const RunData data = load_data(loaded.config);
    const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                           std::chrono::steady_clock::now()};
    // After 3 steps; completed before 3 more or after them.
    const auto state_after_three = [&](bool at_once) {
      RunState state;
      run_ranks("threads", 1, [&](Communicator& communicator) {
        Step step(inputs, communicator);
        step.begin_run(100);
        step.start_epoch(0, 0);
        const auto steps = [&](int first) {
          for (int i = first; i < first + 3; ++i) step.make({.step = i, .density = 0.1, .lr = 0.05});
          for (const StepReport& report : step.reports(3)) CHECK(report.committed());
        };
        steps(0);
        state.model.weights.assign(step.arena().host_weights().size(), kNotYet);
        const std::function<void()> complete = step.state(state);
        REQUIRE(complete);
        CHECK(state.model.weights.front() == kNotYet);
        if (at_once) complete();
        step.start_epoch(1, 0);
        steps(3);
        if (!at_once) std::thread(complete).join();
        step.finish();
      });
      return state;
    };
    const RunState expected = state_after_three(true), state = state_after_three(false);
    CHECK(state.model.weights == expected.model.weights);
    CHECK(state.optimizer == expected.optimizer);
    CHECK(state.residual == expected.residual);
    CHECK(state.exchange == expected.exchange);
    CHECK(state.exchange.size() > (method == "dgc" ? 4 * state.model.weights.size() / 2 : 0));
  }
}

TEST_CASE("on GPUs a language model goes on bit for bit from the middle of an epoch") {
  const MadeUpText text(160);
  const Keys keys =
      with(kGpuRun, {"data.name=text", "data.root=" + text.root(), "data.train_size=0", "data.test_size=0",
                     "data.batch_size=2", "data.sequence_length=10", "model.name=lstm_lm", "model.width=10",
                     "model.dropout=0.3", "optimizer.lr=2", "optimizer.momentum=0", "compress.name=topk"});
  check_same(whole(keys), stopped_and_resumed(keys, kStop));
}

TEST_CASE("on GPUs a run on speech ends as on CPUs within rounding, and goes on bit for bit") {
  const MadeUpSpeech speech(8, 3, 2);
  const Keys keys{
      "data.name=speech",   "data.root=" + speech.root(), "data.train_size=0",  "data.test_size=0",
      "data.batch_size=2",  "model.name=deep_speech",     "model.width=8",      "model.layers=1",
      "dist.ranks=2",       "compress.name=topk",         "train.stop_after=0", "train.max_steps=4",
      "train.eval_every=1", "compress.density=0.1",       "optimizer.lr=0.01",  "train.deterministic=true"};
  const Ended gpu = whole(with(keys, {"train.device=cuda"})), cpu = whole(with(keys, {"train.device=cpu"}));
  check_same(gpu, stopped_and_resumed(with(keys, {"train.device=cuda"}), 3));
  REQUIRE(gpu.metrics.steps.size() == 4);
  CHECK(gpu.metrics.steps[0].loss == Approx(cpu.metrics.steps[0].loss).epsilon(1e-5));
  CHECK(gpu.metrics.steps[3].loss == Approx(cpu.metrics.steps[3].loss).epsilon(1e-3));
  CHECK(gpu.metrics.evals.back().test.word_error_rate.value() ==
        Approx(cpu.metrics.evals.back().test.word_error_rate.value()).margin(0.4));
}
