#include "train/sample.h"

#include <fmt/format.h>

#include "nn/models/model.h"
#include "tests/train/made_up_text.h"
#include "tests/train/small_run.h"
#include "train/run_directory.h"

namespace topknot::testing {
namespace fs = std::filesystem;
namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity(), kNan = std::nanf("");

// A run of a small model on a text, with a checkpoint of its last step.
class TrainedRun {
 public:
  explicit TrainedRun(const Keys& more = {}) {
    run_in_directory(small_run(
        temp_, with({"data.name=text", "data.root=" + text_.root(), "data.train_size=0", "data.test_size=0",
                     "data.sequence_length=12", "data.batch_size=8", "model.name=gpt", "model.width=32",
                     "model.layers=1", "model.heads=2", "model.dropout=0", "optimizer.name=adamw",
                     "optimizer.lr=0.01", "train.max_steps=60", "train.threads=1", "compress.name=dense"},
                    more)));
  }
  std::string directory() const { return temp_.at("run"); }
  const MadeUpText& text() const { return text_; }

  std::string sample(const SampleOptions& options) const { return sample_of(directory(), options); }
  static std::string sample_of(const std::string& run, const SampleOptions& options) {
    std::string text;
    sample_text(run, options, [&](std::string_view part) { text += part; });
    return text;
  }

 private:
  const TempFolder temp_;
  const MadeUpText text_;
};

// A gpt that gives a NaN or an infinite logit in evaluation, if it is told to.
class BrokenGpt final : public Module {
 public:
  BrokenGpt(ParameterStore& store, const ModelOptions& options) : inner_(make_model("gpt", store, options)) {}
  static inline float broken = 0;                   // 0: none
  static inline std::vector<std::int64_t> windows;  // tokens that evaluations were given
  bool reads_tokens() const override { return true; }
  Variable forward(const Variable& x, const ForwardContext& context) override {
    if (!context.training) windows.push_back(x.value().shape()[1]);
    Variable y = inner_->forward(x, context);
    if (!context.training && broken != 0) y.value().data()[y.value().numel() - 3] = broken;
    return y;
  }

 private:
  ModulePtr inner_;
};
const bool broken_gpt_registered = (add_model<BrokenGpt>("test_broken_gpt", "of the tests"), true);

int command(std::vector<const char*> words) {
  words.insert(words.begin(), "sample");
  return sample_command(static_cast<int>(words.size()), words.data());
}

// How often each token comes of evenly spaced draws.
std::vector<double> frequencies(const std::vector<float>& logits, double temperature, std::int64_t top_k) {
  constexpr int kDraws = 10000;
  std::vector<double> shares(logits.size());
  for (int i = 0; i < kDraws; ++i)
    shares[draw_token(logits, temperature, top_k, (i + 0.5) / kDraws)] += 1.0 / kDraws;
  return shares;
}

}  // namespace

TEST_CASE("a token is drawn by the softmax of the logits over the temperature, of the top k alone") {
  const std::vector<float> logits = {1.0f, -0.5f, 2.0f, 0.25f, 2.0f};
  const auto check = [&](double temperature, std::int64_t top_k, std::vector<std::size_t> kept) {
    INFO("temperature " << temperature << ", top " << top_k);
    double sum = 0;
    for (const std::size_t i : kept) sum += std::exp(logits[i] / temperature);
    std::vector<double> expected(logits.size());
    for (const std::size_t i : kept) expected[i] = std::exp(logits[i] / temperature) / sum;
    const std::vector<double> shares = frequencies(logits, temperature, top_k);
    for (std::size_t i = 0; i < logits.size(); ++i)
      CHECK(shares[i] == Approx(expected[i]).margin(2e-4).epsilon(0));
  };
  check(1, 0, {0, 1, 2, 3, 4});
  check(0.5, 0, {0, 1, 2, 3, 4});
  check(3, 5, {0, 1, 2, 3, 4});
  check(1, 3, {0, 2, 4});
  check(1, 1, {2});  // of equal ones the lower
  check(2, 100, {0, 1, 2, 3, 4});
  CHECK(frequencies(logits, 0, 0)[2] == Approx(1));
  CHECK(draw_token(logits, 1, 0, 0) == 0);
  CHECK(draw_token(logits, 1, 0, 1 - 1e-16) == 4);
  CHECK(draw_token(std::vector<float>{3e38f, -3e38f}, 1e-300, 0, 0.99) == 0);
}

TEST_CASE("no token is drawn from logits of which one is not finite") {
  for (const float bad : {kNan, kInfinite, -kInfinite})
    for (const double temperature : {0.0, 1.0}) {
      CHECK_ERROR(draw_token(std::vector<float>{1, bad, 2}, temperature, 1, 0.5), "logit 1 of 3");
    }
}

TEST_CASE("a run's model goes on with a text as it has learned it, the same for the same seed") {
  const TrainedRun run({"train.max_steps=400"});
  // Of a line's words the first decides the others.
  SampleOptions greedy{.prompt = "subject3", .tokens = 4, .temperature = 0};
  const std::string line = run.sample(greedy);
  CHECK(line.starts_with("subject3 verb3 object3 \nsubject"));
  greedy.temperature = 1, greedy.top_k = 1, greedy.seed = 5;
  CHECK(run.sample(greedy) == line);

  const SampleOptions drawn{.tokens = 40};
  const std::string text = run.sample(drawn);
  CHECK(text.starts_with("\nsubject"));  // an end of a line is the prompt that none gives
  CHECK(run.sample(drawn) == text);
  SampleOptions other = drawn;
  other.seed = 2;
  CHECK(run.sample(other) != text);
  CHECK(TrainedRun::sample_of(run.directory() + "/checkpoints/step-000000400", drawn) == text);

  // Longer than the context of 12 tokens, of which the last ones count.
  std::string prompt;
  for (int i = 0; i < 8; ++i) prompt += fmt::format("subject{0} verb{0} object{0}\n", i);
  CHECK(run.sample({.prompt = prompt + "subject6", .tokens = 2, .temperature = 0})
            .ends_with("subject6 verb6 object6 "));
  CHECK(run.sample({.prompt = "subject3", .tokens = 0}) == "subject3 ");
}

TEST_CASE("an LSTM's run goes on with a text as well") {
  const TrainedRun run({"model.name=lstm_lm", "train.max_steps=150"});
  CHECK(run.sample({.prompt = "subject3", .tokens = 2, .temperature = 0}) == "subject3 verb3 object3 ");
}

TEST_CASE("logits that are not finite end the text with one message") {
  const TrainedRun run({"model.name=test_broken_gpt", "train.max_steps=2"});
  // The run's config.yaml has no keys that are known to be gpt's alone.
  SampleOptions options;
  options.tokens = 2;
  options.overrides = {"model.width=32", "model.layers=1", "model.heads=2"};
  CHECK_NOTHROW(run.sample(options));
  for (const float bad : {kNan, kInfinite}) {
    BrokenGpt::broken = bad;
    for (const double temperature : {0.0, 1.0}) {
      options.temperature = temperature;
      CHECK_USER_ERROR(run.sample(options), run.directory(), "after 1 token",
                       bad == kInfinite ? "is infinite" : "is NaN", "step 2", "--step");
    }
  }
  BrokenGpt::broken = 0;
}

TEST_CASE("a model is given the text so far, and no more of it than its window") {
  const TrainedRun run({"model.name=test_broken_gpt", "train.max_steps=2"});
  SampleOptions options{.prompt = "subject1 verb1", .tokens = 3};
  options.overrides = {"model.width=32", "model.layers=1", "model.heads=2"};
  const auto windows = [&] {
    BrokenGpt::windows.clear();
    run.sample(options);
    return BrokenGpt::windows;
  };
  CHECK(windows() == std::vector<std::int64_t>{2, 3, 4});
  for (int i = 0; i < 4; ++i) options.prompt += " verb2 verb3";
  CHECK(windows() == std::vector<std::int64_t>{10, 11, 12});
  options.prompt += " verb2 verb3";
  CHECK(windows() == std::vector<std::int64_t>{12, 12, 12});
}

TEST_CASE("a run whose text is gone goes on with a prompt all the same") {
  for (const char* tokens : {"word", "char", "byte"}) {
    const TrainedRun run({"train.max_steps=2", std::string("data.tokens=") + tokens});
    const SampleOptions options{.prompt = "subject3", .tokens = 20};
    const std::string before = run.sample(options);
    for (const char* file : {"train.txt", "valid.txt", "test.txt"})
      std::filesystem::remove(run.text().root() + "/" + file);
    CHECK(run.sample(options) == before);
    CHECK(before.starts_with("subject3"));
  }
}

TEST_CASE("what cannot be sampled is refused: no run, no text, other data, other words on the command line") {
  const TrainedRun run({"train.max_steps=2"});
  const std::string directory = run.directory();
  const auto refused = [&](const SampleOptions& options, std::initializer_list<std::string> parts) {
    return user_error([&] { run.sample(options); }, parts);
  };
  CHECK(refused({.step = 7}, {directory, "no checkpoint of step 7"}));
  CHECK(refused({.prompt = " "}, {"--prompt"}));
  CHECK(refused({.overrides = {"data.root=/no/such/folder"}}, {"/no/such/folder"}));
  for (const char* key : {"output.dir", "train.device", "data.batch_size"})
    CHECK(refused({.overrides = {std::string(key) + "=4"}}, {"train sample", key}));
  const TempFolder other;
  for (const char* file : {"train.txt", "valid.txt", "test.txt"})
    std::ofstream(other.at(file)) << text_of(run.text().root() + "/" + file) << "another word\n";
  CHECK(refused({.overrides = {"data.root=" + other.str()}}, {"vocabulary", "data.root=DIR"}));

  const TempFolder images;
  run_in_directory(small_run(images, {"train.max_steps=2"}));
  CHECK_USER_ERROR(TrainedRun::sample_of(images.at("run"), {}), "synthetic_images", "language models");

  CHECK_USER_ERROR(command({}), "RUN is missing", "train sample RUN");
  CHECK_USER_ERROR(command({"r", "--temperature", "-1"}), "--temperature");
  CHECK_USER_ERROR(command({"r", "--seed", "-1"}), "--seed", "must be 0 or more, not -1");
  CHECK_USER_ERROR(command({"r", "--top-k", "many"}), "--top-k");
  CHECK_USER_ERROR(command({"no/such/run"}), "no/such/run", "no checkpoint");
  CHECK(command({"--help"}) == 0);
}

TEST_CASE("a text is drawn with the architecture of the weights, and no key changes what no tensor shows") {
  const TrainedRun run({"train.max_steps=1"});
  CHECK(run.sample({.tokens = 2, .overrides = {"model.heads=2"}}) == run.sample({.tokens = 2}));
  for (const char* key : {"model.heads=4", "model.norm_epsilon=0.1", "model.gelu=exact"})
    CHECK_USER_ERROR(run.sample({.tokens = 2, .overrides = {key}}),
                     std::string(key).substr(0, std::string(key).find('=')), "step-000000001 has");
}

}  // namespace topknot::testing
