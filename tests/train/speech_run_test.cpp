// Runs that transcribe made-up speech.
#include <filesystem>
#include <set>

#include "tests/data/made_up_speech.h"
#include "tests/support/error_text.h"
#include "tests/support/standard_error.h"
#include "tests/train/resumed_run.h"
#include "train/evaluate.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

Keys speech_keys(const MadeUpSpeech& speech) {
  return {"data.name=speech",   "data.root=" + speech.root(), "data.train_size=0",  "data.test_size=0",
          "data.batch_size=2",  "model.name=deep_speech",     "model.width=8",      "model.layers=1",
          "dist.ranks=2",       "compress.density=0.1",       "optimizer.lr=0.05",  "train.max_steps=7",
          "train.stop_after=0", "train.eval_every=1",         "train.clip_global=5"};
}

}  // namespace

TEST_CASE("a run on speech goes on bit for bit from the middle of an epoch, over threads and gloo") {
  const MadeUpSpeech speech(16, 5);  // 4 steps per epoch
  for (const std::string method : {"dense", "topk", "dgc"}) {
    INFO(method);
    const Keys keys = with(speech_keys(speech), keys_of_method(method));
    const Ended threads = whole(keys);
    check_same(threads, stopped_and_resumed(keys, 6));
    CHECK(whole(keys, "gloo").checksum == threads.checksum);
  }
}

TEST_CASE("speech: the loss falls, and evaluations record word and character error rates") {
  const MadeUpSpeech speech(16, 5);
  const Ended run = whole(with(speech_keys(speech), {"compress.name=dense", "train.max_steps=24"}));
  REQUIRE(run.metrics.steps.size() == 24);
  CHECK(run.metrics.steps.back().loss < 0.6 * run.metrics.steps.front().loss);
  REQUIRE(run.metrics.end);
  REQUIRE(run.metrics.starts.size() == 1);
  CHECK(run.metrics.starts[0].metric == Metric::word_errors());
  REQUIRE_FALSE(run.metrics.evals.empty());
  const EvalRecord& last = run.metrics.evals.back();
  CHECK(last.test.word_error_rate.value() == Approx(1 - last.test.accuracy.value()));
  CHECK((last.test.word_error_rate.value() > 0 && last.test.character_error_rate.value() > 0));
  CHECK(run.metrics.end->test.word_error_rate == last.test.word_error_rate);
  CHECK(run.metrics.end->test.character_error_rate == last.test.character_error_rate);
}

TEST_CASE("a run on speech goes on without damaged recordings up to data.max_bad_files, and says so") {
  const MadeUpSpeech speech(16, 5);
  std::filesystem::resize_file(speech.at("train3.wav"),
                               std::filesystem::file_size(speech.at("train3.wav")) - 2);
  const Keys keys = with(speech_keys(speech), {"compress.name=dense"});
  CHECK(says(error_text([&] { whole(keys); }), {"train.tsv:4: ", "train3.wav", "data.max_bad_files=1"}));
  const StandardError errors;
  CHECK(whole(with(keys, {"data.max_bad_files=1"})).metrics.steps.size() == 7);
  CHECK(says(errors.text(),
             {"on speech (15 training and 5 test recordings, 29 classes)", "train3.wav", "left out"}));
}

TEST_CASE("speech: rates are over all words and characters, and frames those that the model gives") {
  EvaluationSums sums;
  sums.loss = 6, sums.samples = 2, sums.word_errors = 1, sums.words = 5, sums.character_errors = 3,
  sums.characters = 12;
  CHECK(sums.mean().loss == 3);
  CHECK(sums.mean().accuracy == Approx(0.8));
  CHECK(sums.mean().second == Approx(0.25));

  const MadeUpSpeech speech(4, 2);
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, speech_keys(speech));
  const RunData data = load_data(loaded.config);
  const auto model = build_model(loaded.config, *data.train);
  Batch batch;
  batch.frames = {13, 26};
  CHECK((output_frames(*model->module, batch) == std::vector<std::int32_t>{7, 13}));  // every second one
}

TEST_CASE(
    "speech: an evaluation is the same with other batches, and a step's loss is that of recordings without "
    "padding") {
  const MadeUpSpeech speech(4, 5);
  const TempFolder temp;
  const LoadedConfig loaded = small_run(
      temp, with(speech_keys(speech),
                 {"dist.ranks=1", "data.batch_size=4", "compress.name=dense", "train.max_steps=1"}));
  const RunData data = load_data(loaded.config);
  const auto model = build_model(loaded.config, *data.train);
  const auto batches_of = [&](std::int64_t size, bool train) {
    LoaderOptions options;
    options.batch = size, options.train = train, options.seed = loaded.config.seed;
    return std::make_unique<HostBatches>(train ? *data.train : *data.test, options, *model->module);
  };

  std::vector<double> losses;
  for (const std::int64_t size : {1, 2, 5})
    losses.push_back(evaluation_sums(*model, *batches_of(size, false), [](auto, auto) { return true; }).loss);
  CHECK(losses[1] == Approx(losses[0]));
  CHECK(losses[2] == Approx(losses[0]));

  const auto batches = batches_of(4, true);
  batches->start_epoch(0, 0);
  const Batch& batch = *batches->of_step(0).host;
  REQUIRE(std::set(batch.frames.begin(), batch.frames.end()).size() > 1);
  const auto frames = output_frames(*model->module, batch);
  const auto loss_of = [&](std::span<const std::int32_t> of) {
    ForwardContext context;
    context.frames = of;
    return batch_loss(model->forward(batch.images, context), view_of(batch, frames)).value().data()[0];
  };
  const float masked = loss_of(frames);
  const Ended run = whole(with(speech_keys(speech), {"dist.ranks=1", "data.batch_size=4",
                                                     "compress.name=dense", "train.max_steps=1"}));
  REQUIRE(run.metrics.steps.size() == 1);
  CHECK(run.metrics.steps[0].loss == Approx(masked));
  CHECK(std::abs(loss_of({}) - masked) > 1e-3f * masked);
}

TEST_CASE("speech: a transcript too long for its recording, and models of another task, are refused") {
  const MadeUpSpeech speech(4, 2);
  const auto problem = [&](const Keys& keys) {
    const TempFolder temp;
    const LoadedConfig loaded = small_run(temp, with(speech_keys(speech), keys));
    std::string text;
    for (const Problem& one : check_run(loaded.config, load_data(loaded.config)).problems)
      text += one.message + "\n";
    return text;
  };
  CHECK(problem({"data.batch_size=1"}).empty());
  CHECK(problem({"data.batch_size=1", "model.name=mlp"}).find("does not transcribe") != std::string::npos);
  CHECK(problem({"data.batch_size=1", "data.name=synthetic_images"}).find("spectrograms") !=
        std::string::npos);
  CHECK(problem({"data.batch_size=4"}).find("data.batch_size: 4 samples do not fill") != std::string::npos);
  std::ofstream(speech.at("test.tsv")) << "test0.wav\tA MUCH TOO LONG SENTENCE\n";
  const std::string text = problem({"data.batch_size=1"});
  INFO(text);
  CHECK(text.find("test0.wav") != std::string::npos);
  CHECK(text.find("of 24 characters takes 25 frames") != std::string::npos);
}
