// Whole runs on texts, token files, speech and folders of pictures.
#include <numbers>

#include "nn/ops/ops.h"
#include "tests/data/made_up_speech.h"
#include "tests/data/picture_folder.h"
#include "tests/support/standard_error.h"
#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"
#include "tests/train/watched_lm.h"
#include "train/checkpoint/model_file.h"
#include "train/checks.h"
#include "train/evaluate.h"
#include "train/run_directory.h"
#include "train/setup.h"

namespace topknot::testing {
namespace {

// 1600 tokens: 19 steps per epoch on one rank of 4 columns, 9 on two.
Keys lm_keys(const MadeUpText& text, const Keys& more = {}) {
  return language_model_keys(text.root(), with({"data.name=text", "data.sequence_length=20", "model.width=24",
                                                "model.layers=2", "optimizer.lr=5"},
                                               more));
}

// What lm_keys() has for lstm_lm, for every language model: transformers take a lower rate.
const std::vector<Keys>& language_models() {
  static const std::vector<Keys> all{
      {"model.name=lstm_lm"},
      {"model.name=gpt", "model.heads=4", "optimizer.lr=0.5"},
      {"model.name=llama", "model.heads=4", "model.kv_heads=2", "model.feed_forward=40", "optimizer.lr=0.5"}};
  return all;
}

Keys speech_keys(const MadeUpSpeech& speech) {
  return {"data.name=speech",   "data.root=" + speech.root(), "data.train_size=0",  "data.test_size=0",
          "data.batch_size=2",  "model.name=deep_speech",     "model.width=8",      "model.layers=1",
          "dist.ranks=2",       "compress.density=0.1",       "optimizer.lr=0.05",  "train.max_steps=7",
          "train.stop_after=0", "train.eval_every=1",         "train.clip_global=5"};
}

Keys keys_of(const PictureFolder& folder, const Keys& more = {}) {
  return with(
      {"data.name=image_folder", "data.root=" + folder.str(), "data.image_size=12", "data.train_size=0",
       "data.test_size=0", "data.batch_size=2", "train.max_steps=8", "compress.name=topk"},
      more);
}

Keys token_keys(const std::string& root, const Keys& more = {}) {
  return language_model_keys(
      root, with({"data.sequence_length=10", "model.width=16", "model.layers=1", "optimizer.lr=1"}, more));
}

// Tokens below 20, as uint16.
struct MadeUpTokens : TempFolder {
  MadeUpTokens() {
    for (const auto& [name, count] : {std::pair("train.bin", 3000), std::pair("val.bin", 333)}) {
      std::vector<std::uint8_t> bytes(2 * static_cast<std::size_t>(count));
      for (int i = 0; i < count; ++i)
        bytes[2 * static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(i * i % 19);
      write(name, bytes);
    }
  }
  std::string root() const { return str(); }
};

// Keys of a run on such files.
Keys file_keys(const std::string& root, const Keys& more = {}) {
  return token_keys(root, with({"data.name=tokens", "data.vocabulary=20"}, more));
}

bool refused(const Keys& keys, std::initializer_list<std::string> parts) {
  return says(error_text([&] { train("threads", 1, keys); }), parts);
}

}  // namespace

TEST_CASE("a language model learns a made-up text: what is left is the choice of the subject") {
  const MadeUpText text(1600);  // long enough not to be known by heart
  const Metrics metrics =
      train("threads", 1,
            lm_keys(text, {"train.max_steps=500", "train.eval_every=1", "model.width=32", "optimizer.lr=1",
                           "optimizer.momentum=0.9", "train.clip_global=2"}))
          .metrics;
  // 26 words; a quarter of the tokens has 8 equally likely values, the others are certain.
  CHECK(metrics.steps.front().loss == Approx(std::log(26.0)).margin(0.05));
  const double least = std::log(kSubjects) / 4;
  REQUIRE(metrics.starts.size() == 1);
  CHECK(metrics.starts[0].metric == Metric::perplexity());
  CHECK(metrics.starts[0].task == "text, 26 words");
  for (const EvalRecord& eval : metrics.evals) {
    CHECK(eval.test.perplexity.value() == Approx(std::exp(eval.test.loss)));
    CHECK_FALSE(eval.test.accuracy);
  }
  const EndRecord& end = metrics.end.value();
  CHECK(end.test.loss > 0.95 * least);
  CHECK(end.test.loss < 1.15 * least);
  CHECK(end.test.perplexity.value() == Approx(std::exp(end.test.loss)));
  const double held_out_loss = end.held_out_loss.value();
  CHECK(held_out_loss > 0.95 * least);
  CHECK(held_out_loss != end.test.loss);
  CHECK(end.held_out_perplexity.value() == Approx(std::exp(held_out_loss)));
  // A state that is carried tells where in the line a window begins: 80 tokens of a step, of all of which it
  // counts.
  CHECK(metrics.steps.back().images_per_second > 80);
}

TEST_CASE("a language model goes on bit for bit from the middle of an epoch, by threads and by gloo") {
  const MadeUpText text;
  for (const Keys& model : language_models())
    for (const Keys& keys : {Keys{"compress.name=dense", "dist.ordered_sum=true"},
                             Keys{"compress.name=topk", "model.dropout=0.3", "model.tied=true"},
                             Keys{"compress.name=dgc", "optimizer.momentum=0.5", "train.accumulate=2"}}) {
      INFO(model.front() << " " << keys.front());
      const Keys all = lm_keys(text, with(with(model, {"dist.ranks=2", "train.max_steps=24",
                                                       "train.stop_after=0", "train.eval_every=0.5"}),
                                          keys));
      const Ended expected = whole(all);
      const Ended resumed = stopped_and_resumed(all, 14);
      check_same(expected, resumed);
      check_same(expected, stopped_and_resumed(all, 14, "gloo"));
      CHECK(expected.metrics.end->held_out_loss == resumed.metrics.end->held_out_loss);
      CHECK(expected.metrics.steps.back().loss < expected.metrics.steps.front().loss);
    }
}

TEST_CASE("a text whose perplexity is infinite ends as a run that diverged, however finite its loss is") {
  const MadeUpText text(40);
  const TempFolder temp;
  const Keys keys = lm_keys(text, {"optimizer.lr=1e4", "train.clip_global=0", "train.max_steps=6"});
  CHECK(says(start_error(temp, keys, false), {"the last evaluation was not finite"}));
  const EvalRecord last = metrics_of(temp).evals.back();
  CHECK(std::isfinite(last.test.loss));
  CHECK_FALSE(std::isfinite(last.test.perplexity.value()));
}

TEST_CASE("evaluations of a language model count every window once, on any ranks, and disturb nothing") {
  const MadeUpText text;
  const Keys keys = lm_keys(text, {"train.max_steps=1", "optimizer.lr=0.0001"});
  const double alone = train("threads", 1, keys).test_loss;
  for (const int ranks : {2, 3, 4})
    CHECK(train("threads", ranks, keys).test_loss == Approx(alone).epsilon(1e-5));
  const Keys longer = lm_keys(text, {"train.max_steps=12", "compress.name=topk"});
  CHECK(train("threads", 2, with(longer, {"train.eval_every=0.25"})).checksums ==
        train("threads", 2, longer).checksums);
}

TEST_CASE("the state is carried through an epoch and micro-batches, and begins anew with the next epoch") {
  const MadeUpText text;
  const auto states_of = [&](const Keys& keys) {
    seen_states.clear();
    const Run run = train("threads", 1, lm_keys(text, with({"model.name=test_broken_lm"}, keys)));
    if (run.metrics.steps.size() > kBrokenStep) CHECK(run.metrics.steps[kBrokenStep].skipped);
    return seen_states;
  };
  const auto states = states_of({"train.max_steps=40", "train.max_skips=2"});
  REQUIRE(states.size() == 40);
  const std::vector<float> zeros(states[0].size(), 0.0f);
  for (std::size_t i = 0; i < states.size(); ++i) {
    INFO("step " << i);
    CHECK((states[i] == zeros) == (i % 19 == 0));
  }
  // A discarded step leaves the state as it was before.
  CHECK(states[kBrokenStep + 1] == states[kBrokenStep]);
  CHECK(states[kBrokenStep + 2] != states[kBrokenStep + 1]);
  const auto parts = states_of({"train.max_steps=1", "train.accumulate=3"});
  REQUIRE(parts.size() == 3);
  CHECK(parts[1] != parts[0]);
  CHECK(parts[2] != parts[1]);
}

TEST_CASE("a language model's file has its parameters and no state, and a run can begin from it") {
  const MadeUpText text;
  const TempFolder temp;
  const Keys keys = lm_keys(text, {"train.max_steps=5"});
  start(temp, keys, false);
  const std::string file = temp.at("run/checkpoints/step-000000005/model.safetensors");
  const SafetensorsFile model = SafetensorsFile::read(file);
  CHECK(model.find("rnn.weight_hh_l1"));
  CHECK_FALSE(model.find("rnn.hidden_l0"));
  CHECK(SafetensorsFile::read(temp.at("run/checkpoints/step-000000005/rank-0000.safetensors"))
            .find("statistics.rnn.hidden_l0"));
  const Run from = train("threads", 1, lm_keys(text, {"train.max_steps=1", "model.init_from=" + file}));
  CHECK(from.metrics.steps[0].loss < 0.95 * std::log(26.0));
  const std::string status = status_text(temp.at("run"));
  CHECK(says(status, {"validation perplexity", "tokens/s"}));
}

TEST_CASE("models and data that do not go together, and data that do not fit, are the user's errors") {
  const MadeUpText text;
  const MadeUpTokens tokens;
  for (const auto& [keys, name] :
       {std::pair(lm_keys(text), "lstm_lm"), std::pair(file_keys(tokens.root()), "data.name=tokens")}) {
    CHECK(refused(with(keys, {"model.name=mlp"}), {"model.name: mlp does not read tokens", name}));
    CHECK(refused(with(keys, {"data.shard=by_label"}), {"data.shard", "even"}));
  }
  CHECK(refused(lm_keys(text, {"data.name=synthetic_images", "data.train_size=64", "data.test_size=8"}),
                {"model.name: lstm_lm reads tokens", "synthetic_images"}));
  CHECK(refused(lm_keys(text, {"data.sequence_length=390", "data.batch_size=5"}),
                {"data.batch_size", "data.sequence_length"}));
  CHECK(refused(lm_keys(text, {"data.augment=true"}), {"data.augment", "text"}));
  CHECK(refused(file_keys(tokens.root(), {"data.vocabulary=1"}), {"data.vocabulary", "2 to 10,000,000"}));
  CHECK(refused(file_keys(tokens.root(), {"data.windows=each"}), {"data.windows", "columns", "random"}));
  CHECK(refused(file_keys(tokens.root(), {"data.tokens=letter"}), {"data.tokens", "word", "byte", "char"}));
  CHECK(refused(file_keys(tokens.root() + "/none"), {"data.root", "no such folder"}));
}

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
  const Metrics metrics =
      whole(with(speech_keys(speech), {"compress.name=dense", "train.max_steps=24"})).metrics;
  REQUIRE(metrics.steps.size() == 24);
  CHECK(metrics.steps.back().loss < 0.6 * metrics.steps.front().loss);
  REQUIRE(metrics.starts.size() == 1);
  CHECK(metrics.starts[0].metric == Metric::word_errors());
  REQUIRE_FALSE(metrics.evals.empty());
  const auto& last = metrics.evals.back().test;
  CHECK(last.word_error_rate.value() == Approx(1 - last.accuracy.value()));
  CHECK(last.word_error_rate.value() > 0);
  CHECK(last.character_error_rate.value() > 0);
  const auto& end = metrics.end.value().test;
  CHECK(end.word_error_rate == last.word_error_rate);
  CHECK(end.character_error_rate == last.character_error_rate);
}

TEST_CASE("speech: rates are over all words and characters, and frames those that the model gives") {
  EvaluationSums sums;
  sums.loss = 6, sums.samples = 2, sums.word_errors = 1, sums.words = 5, sums.character_errors = 3,
  sums.characters = 12;
  CHECK(sums.mean().loss == 3);
  CHECK(sums.mean().accuracy == Approx(0.8));
  CHECK(sums.mean().second == Approx(0.25));
  const MadeUpSpeech speech(4, 2);
  Batch batch;
  batch.frames = {13, 26};
  CHECK((output_frames(*Prepared(speech_keys(speech)).model->module, batch) ==
         std::vector<std::int32_t>{7, 13}));  // every second one
}

TEST_CASE("speech: evaluations do not depend on batches, and a step's loss is without padding") {
  const MadeUpSpeech speech(4, 5);
  const Keys keys = with(speech_keys(speech),
                         {"dist.ranks=1", "data.batch_size=4", "compress.name=dense", "train.max_steps=1"});
  const Prepared prepared(keys);
  BuiltModel& model = *prepared.model;
  const auto batches_of = [&](int size, bool train) {
    LoaderOptions options;
    options.batch_size = size, options.train = train, options.seed = prepared.loaded.config.seed;
    return std::make_unique<Batches>(train ? *prepared.data.train : *prepared.data.test, options,
                                     in_host_memory(*model.module));
  };

  const auto loss_by = [&](int size) {
    return evaluation_sums(model, *batches_of(size, false), [](auto, auto) { return true; }).loss;
  };
  for (const int size : {2, 5}) CHECK(loss_by(size) == Approx(loss_by(1)));

  const auto batches = batches_of(4, true);
  batches->start_epoch(0, 0);
  const Batch& batch = *batches->of_step(0).host;
  REQUIRE(std::set(batch.frames.begin(), batch.frames.end()).size() > 1);
  const auto frames = output_frames(*model.module, batch);
  const auto loss_of = [&](std::span<const std::int32_t> of) {
    ForwardContext context;
    context.frames = of;
    return batch_loss(model.forward(batch.images, context), view_of(batch, frames)).value().data()[0];
  };
  const float masked = loss_of(frames);
  const Ended run = whole(keys);
  REQUIRE(run.metrics.steps.size() == 1);
  CHECK(run.metrics.steps[0].loss == Approx(masked));
  CHECK(std::abs(loss_of({}) - masked) > 1e-3f * masked);
}

TEST_CASE("speech: a transcript too long for its recording, and models of another task, are refused") {
  const MadeUpSpeech speech(4, 2);
  const auto problem = [&](const Keys& keys) {
    const TempFolder temp;
    const Config config =
        small_run(temp, with(speech_keys(speech), with({"data.batch_size=1"}, keys))).config;
    std::string text;
    for (const Problem& one : check_run(config, load_data(config)).problems) text += one.message + "\n";
    return text;
  };
  CHECK(problem({}).empty());
  CHECK(says(problem({"model.name=mlp"}), {"does not transcribe"}));
  CHECK(says(problem({"data.name=synthetic_images"}), {"spectrograms"}));
  CHECK(says(problem({"data.batch_size=4"}), {"data.batch_size: 4 samples do not fill"}));
  std::ofstream(speech.at("test.tsv")) << "test0.wav\tA MUCH TOO LONG SENTENCE\n";
  CHECK(says(problem({}), {"test0.wav", "of 24 characters takes 25 frames"}));
}

TEST_CASE("a damaged picture ends a run above data.max_bad_files; the start says what is not read") {
  const PictureFolder folder;
  folder.write("train/classa/x.webp", {1});
  std::string text;
  {
    const StandardError errors;
    train("threads", 2, keys_of(folder));
    text = errors.text();
  }
  const std::string warning = "not read: *.webp (1)";
  CHECK(says(text, {"on image_folder (12 training and 6 test samples, 3 classes), 2 ranks by", warning}));
  CHECK(text.find(warning) == text.rfind(warning));
  folder.write("train/classb/p1.ppm", {'P', '6'});
  CHECK_ERROR(train("threads", 1, keys_of(folder)), "training picture", "train/classb/p1.ppm",
              "data.max_bad_files=1");
  CHECK(train("threads", 2, keys_of(folder, {"data.max_bad_files=1"})).metrics.steps.size() == 8);
}

TEST_CASE("a run on characters reports perplexity per character, bits per byte and what it computed") {
  const MadeUpText text;
  const Keys keys = token_keys(text.root(), {"data.name=text", "data.tokens=char", "train.max_steps=40",
                                             "train.accumulate=2", "train.peak_tflops=0.5"});
  const Run run = train("threads", 2, keys);
  REQUIRE(run.metrics.end);
  const EndRecord& end = *run.metrics.end;
  CHECK(run.metrics.starts[0].metric == Metric::perplexity("character"));
  // The digits 0 to 7, blank, newline and the letters of subject, verb, object.
  CHECK(run.metrics.starts[0].task == "text, 20 characters");
  CHECK(run.metrics.steps.front().loss == Approx(std::log(20.0)).margin(0.1));
  CHECK(run.test_loss < 0.95 * std::log(20.0));
  CHECK(end.test.perplexity.value() == Approx(std::exp(run.test_loss)));
  CHECK(end.test.bits_per_byte.value() == Approx(run.test_loss / std::numbers::ln2));
  CHECK(run.metrics.evals.back().test.bits_per_byte == end.test.bits_per_byte);
  CHECK(end.held_out_loss);
  // Per token: the layer's two products and the output's, forward and twice that backward.
  const double layer = 2.0 * 64 * 32, output = 2.0 * 20 * 16;
  CHECK(1e12 * end.model_tflops == Approx(3 * (layer + output) * end.images_per_second));
  CHECK(end.flops_utilisation.value() == Approx(end.model_tflops / (2 * 0.5)));

  const Run words = train("threads", 1, token_keys(text.root(), {"data.name=text", "train.max_steps=2"}));
  CHECK_FALSE(words.metrics.end->test.bits_per_byte);
  CHECK_FALSE(words.metrics.end->flops_utilisation);
}

TEST_CASE("a run on token files needs no test file, and knows bytes by data.bytes_per_token") {
  const MadeUpTokens tokens;
  const Keys keys = file_keys(tokens.root(), {"train.max_steps=60", "data.bytes_per_token=2.5",
                                              "optimizer.momentum=0.9", "train.clip_global=2"});
  const Run run = train("threads", 1, keys);
  CHECK(run.metrics.starts[0].task == "tokens, 20 tokens");
  CHECK(run.metrics.starts[0].metric.unit == "per token");
  CHECK(run.test_loss < 0.9 * run.metrics.steps.front().loss);
  REQUIRE(run.metrics.end);
  CHECK_FALSE(run.metrics.end->held_out_loss);
  CHECK(run.metrics.end->test.bits_per_byte.value() == Approx(run.test_loss / std::numbers::ln2 / 2.5));
}

TEST_CASE("windows at random: a state of zeros in each step, other windows on each rank, no end") {
  const MadeUpTokens tokens;
  const Keys keys = file_keys(tokens.root(), {"data.windows=random", "model.name=test_watched_lm",
                                              "train.max_steps=90", "train.accumulate=2"});
  seen_states.clear();
  const Run run = train("threads", 2, keys);
  REQUIRE(seen_states.size() == 180);
  const std::vector<float> zeros(seen_states[0].size());
  CHECK(std::count(seen_states.begin(), seen_states.end(), zeros) == 180);
  CHECK(run.metrics.starts[0].steps_per_epoch == 3000 / (2 * 4 * 10) / 2);
  CHECK(run.test_loss < 0.95 * run.metrics.steps.front().loss);

  // Drawn with replacement, they suffice for a step of any number of batches.
  const Keys more = with(keys, {"train.accumulate=40", "train.max_steps=2"});
  CHECK(train("threads", 2, more).metrics.starts[0].steps_per_epoch == 1);

  seen_states.clear();  // down the columns it goes on
  train("threads", 1, with(keys, {"data.windows=columns", "train.max_steps=3"}));
  CHECK(std::count(seen_states.begin(), seen_states.end(), zeros) == 1);
}

TEST_CASE("windows at random: a run goes on bit for bit from the middle of an epoch, with any workers") {
  const MadeUpText text;
  const Keys keys =
      token_keys(text.root(), {"data.name=text", "data.tokens=byte", "data.windows=random", "dist.ranks=2",
                               "train.max_steps=24", "train.eval_every=0.02", "compress.name=topk",
                               "data.test_size=2000", "train.stop_after=0", "data.workers=0"});
  const Ended expected = whole(keys);
  check_same(expected, stopped_and_resumed(keys, 13));
  check_same(expected, whole(with(keys, {"data.workers=3"})));
  CHECK(whole(with(keys, {"seed=2"})).metrics.steps[5].loss != expected.metrics.steps[5].loss);
}

TEST_CASE("heads wider than a GPU's attention takes are refused before a run, on CPUs they are not") {
  const MadeUpTokens tokens;
  const auto problems = [&](const std::string& device, const std::string& heads) {
    const Config config = load_config("", file_keys(tokens.root(), {"model.name=gpt", "model.width=514",
                                                                    "train.device=" + device, heads}))
                              .config;
    return check_run(config, load_data(config)).problems;
  };
  const std::vector<Problem> found = problems("cuda", "model.heads=2");
  REQUIRE(found.size() == 1);
  CHECK(says(found[0].message, {"model.heads: 2 heads of model.width=514", "257", "up to 256"}));
  CHECK(problems("cpu", "model.heads=2").empty());
}

}  // namespace topknot::testing
