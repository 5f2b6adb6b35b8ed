// Whole runs of language models on characters, on token files and on windows drawn at random.
#include <numbers>

#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"
#include "tests/train/watched_lm.h"
#include "train/setup.h"

namespace topknot::testing {
namespace {

Keys lm_keys(const std::string& root, const Keys& more = {}) {
  return language_model_keys(
      root, with({"data.sequence_length=10", "model.width=16", "model.layers=1", "optimizer.lr=1"}, more));
}

// 20 words of 16 letters each, as uint16; `bad`: a token of the training file that has another value.
class MadeUpTokens {
 public:
  explicit MadeUpTokens(std::int64_t bad = -1) {
    write("train.bin", 3000, bad);
    write("val.bin", 333, -1);
  }
  std::string root() const { return folder_.str(); }

 private:
  void write(const char* name, std::int64_t count, std::int64_t bad) {
    std::vector<std::uint8_t> bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t token = i == bad ? 999 : i * i % 19;
      bytes.push_back(static_cast<std::uint8_t>(token)),
          bytes.push_back(static_cast<std::uint8_t>(token >> 8));
    }
    folder_.write(name, bytes);
  }
  TempFolder folder_;
};

}  // namespace

TEST_CASE("a run on characters reports perplexity per character, bits per byte and what it computed") {
  const MadeUpText text;
  const Keys keys = lm_keys(text.root(), {"data.name=text", "data.tokens=char", "train.max_steps=40",
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

  const Run words = train("threads", 1, lm_keys(text.root(), {"data.name=text", "train.max_steps=2"}));
  CHECK_FALSE(words.metrics.end->test.bits_per_byte);
  CHECK_FALSE(words.metrics.end->flops_utilisation);
}

TEST_CASE("a run on token files needs no test file, and knows bytes by data.bytes_per_token") {
  const MadeUpTokens tokens;
  const Keys keys =
      lm_keys(tokens.root(), {"data.name=tokens", "data.vocabulary=20", "train.max_steps=60",
                              "data.bytes_per_token=2.5", "optimizer.momentum=0.9", "train.clip_global=2"});
  const Run run = train("threads", 1, keys);
  CHECK(run.metrics.starts[0].task == "tokens, 20 tokens");
  CHECK(run.metrics.starts[0].metric.unit == "per token");
  CHECK(run.test_loss < 0.9 * run.metrics.steps.front().loss);
  REQUIRE(run.metrics.end);
  CHECK_FALSE(run.metrics.end->held_out_loss);
  CHECK(run.metrics.end->test.bits_per_byte.value() == Approx(run.test_loss / std::numbers::ln2 / 2.5));
  for (const int ranks : {2, 3})  // every token but the first once, on whichever rank
    CHECK(train("threads", ranks, with(keys, {"train.max_steps=1", "optimizer.lr=1e-6"})).test_loss ==
          Approx(train("threads", 1, with(keys, {"train.max_steps=1", "optimizer.lr=1e-6"})).test_loss)
              .epsilon(1e-5));
  const MadeUpTokens bad(1234);
  const std::string error = error_text([&] {
    train("threads", 1, with(keys, {"data.root=" + bad.root(), "train.max_steps=100"}));
  });
  CHECK(says(error, {"train.bin", "token 1234 (from 0, at byte 2468) is 999", "data.vocabulary has 20"}));
}

TEST_CASE("windows at random: a state of zeros in each step, other windows on each rank, no end") {
  const MadeUpTokens tokens;
  const Keys keys =
      lm_keys(tokens.root(), {"data.name=tokens", "data.vocabulary=20", "data.windows=random",
                              "model.name=test_watched_lm", "train.max_steps=90", "train.accumulate=2"});
  seen_states.clear();
  const Run run = train("threads", 2, keys);
  REQUIRE(seen_states.size() == 180);
  const std::vector<float> zeros(seen_states[0].size());
  CHECK(std::count(seen_states.begin(), seen_states.end(), zeros) == 180);
  CHECK(run.metrics.starts[0].steps_per_epoch == 3000 / (2 * 4 * 10) / 2);
  CHECK(run.test_loss < 0.95 * run.metrics.steps.front().loss);
  CHECK(train("gloo", 2, keys).checksums == run.checksums);

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
      lm_keys(text.root(), {"data.name=text", "data.tokens=byte", "data.windows=random", "dist.ranks=2",
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
    const Config config =
        load_config("", lm_keys(tokens.root(), {"data.name=tokens", "data.vocabulary=20", "model.name=gpt",
                                                "model.width=514", "train.device=" + device, heads}))
            .config;
    return check_run(config, load_data(config)).problems;
  };
  const std::vector<Problem> found = problems("cuda", "model.heads=2");
  REQUIRE(found.size() == 1);
  CHECK(says(found[0].message, {"model.heads: 2 heads of model.width=514", "257", "up to 256"}));
  CHECK(problems("cpu", "model.heads=2").empty());
}

TEST_CASE("what does not go with token files is refused") {
  const MadeUpTokens tokens;
  const auto refused = [&](const Keys& keys, std::initializer_list<std::string> parts) {
    return says(
        error_text([&] {
          train("threads", 1, lm_keys(tokens.root(), with({"data.name=tokens", "data.vocabulary=20"}, keys)));
        }),
        parts);
  };
  CHECK(refused({"model.name=mlp"}, {"model.name: mlp does not read tokens", "data.name=tokens"}));
  CHECK(refused({"data.shard=by_label"}, {"data.shard", "even"}));
  CHECK(refused({"data.vocabulary=1"}, {"data.vocabulary", "2 to 10,000,000"}));
  CHECK(refused({"data.windows=each"}, {"data.windows", "columns", "random"}));
  CHECK(refused({"data.tokens=letter"}, {"data.tokens", "word", "byte", "char"}));
  CHECK(refused({"data.root=" + tokens.root() + "/none"}, {"data.root", "no such folder"}));
}

}  // namespace topknot::testing
