// Whole runs of a language model.
#include <cmath>

#include "nn/ops/ops.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"
#include "train/checkpoint/model_file.h"
#include "train/status.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// 1600 tokens: 19 steps per epoch on one rank of 4 columns, 9 on two.
Keys lm_keys(const MadeUpText& text, const Keys& more = {}) {
  return with({"data.name=text", "data.root=" + text.root(), "data.train_size=0", "data.test_size=0",
               "data.sequence_length=20", "model.name=lstm_lm", "model.width=24", "model.layers=2",
               "model.dropout=0", "optimizer.lr=5", "optimizer.momentum=0", "optimizer.weight_decay=0",
               "train.clip_global=0.5", "compress.density=0.05", "train.threads=1"},
              more);
}

// lstm_lm whose logits are NaN in one step of rank 0, and that keeps the state with which each of its training steps
// begins there.
struct BrokenStep {
  static constexpr std::uint32_t kBroken = 3;
  static inline std::vector<std::vector<float>> states;
};
class BrokenLm final : public Module {
 public:
  BrokenLm(ParameterStore& store, const ModelOptions& options)
      : store_(store), inner_(make_model("lstm_lm", store, options)) {}
  bool reads_tokens() const override { return true; }
  Variable forward(const Variable& x, const ForwardContext& context) override {
    if (context.training && context.rank == 0) BrokenStep::states.push_back(store_.buffers().back()->values);
    Variable y = inner_->forward(x, context);
    if (context.training && context.rank == 0 && context.step == BrokenStep::kBroken)
      y.value().data()[0] = std::numeric_limits<float>::quiet_NaN();
    return y;
  }

 private:
  ParameterStore& store_;
  ModulePtr inner_;
};
const RegisterModel broken_lm("test_broken_lm", "of the tests",
                              [](ParameterStore& store, const ModelOptions& options) -> ModulePtr {
                                return std::make_unique<BrokenLm>(store, options);
                              });

}  // namespace

TEST_CASE("a language model learns a made-up text: what is left is the choice of the subject") {
  const MadeUpText text(1600);  // long enough not to be known by heart
  const Run run = train("threads", 1,
                        lm_keys(text, {"train.max_steps=500", "train.eval_every=1", "model.width=32",
                                       "optimizer.lr=1", "optimizer.momentum=0.9", "train.clip_global=2"}));
  const auto& steps = run.metrics.steps;
  // 26 words; a quarter of the tokens has 8 equally likely values, the others are certain.
  CHECK(steps.front().loss == Approx(std::log(26.0)).margin(0.05));
  const double least = std::log(kSubjects) / 4;
  CHECK(run.test_loss > 0.95 * least);
  CHECK(run.test_loss < 1.15 * least);
  REQUIRE(run.metrics.starts.size() == 1);
  CHECK(run.metrics.starts[0].metric == Metric::perplexity());
  CHECK(run.metrics.starts[0].task == "text, 26 words");
  REQUIRE(run.metrics.end);
  for (const EvalRecord& eval : run.metrics.evals) {
    CHECK(eval.test.perplexity.value() == Approx(std::exp(eval.test.loss)));
    CHECK_FALSE(eval.test.accuracy);
  }
  CHECK(run.metrics.end->test.perplexity.value() == Approx(std::exp(run.test_loss)));
  const double held_out_loss = run.metrics.end->held_out_loss.value();
  CHECK(held_out_loss > 0.95 * least);
  CHECK(held_out_loss != run.test_loss);
  CHECK(run.metrics.end->held_out_perplexity.value() == Approx(std::exp(held_out_loss)));
  // A state that is carried tells where in the line a window begins: 80 tokens of a step, of all of which it counts.
  CHECK(steps.back().images_per_second > 80);
}

TEST_CASE(
    "language models: ranks agree, and threads equal gloo, with dense, topk and dgc, tied and with dropout") {
  const MadeUpText text;
  for (const Keys& keys : {Keys{"compress.name=dense", "dist.ordered_sum=true"}, Keys{"compress.name=topk"},
                           Keys{"compress.name=dgc", "optimizer.momentum=0.5", "optimizer.lr=0.5"},
                           Keys{"compress.name=topk", "model.tied=true", "model.dropout=0.3"}}) {
    INFO(keys.front() << " " << keys.back());
    const Keys all = lm_keys(text, with({"train.max_steps=12"}, keys));
    const Run threads = train("threads", 3, all);
    CHECK(threads.checksums == train("gloo", 3, all).checksums);
    CHECK(threads.metrics.steps.back().loss < threads.metrics.steps.front().loss);
  }
}

TEST_CASE("a language model goes on bit for bit from the middle of an epoch, by threads and by gloo") {
  const MadeUpText text;
  for (const Keys& keys :
       {Keys{"compress.name=dense", "dist.ordered_sum=true"}, Keys{"compress.name=topk", "model.dropout=0.3"},
        Keys{"compress.name=dgc", "optimizer.momentum=0.5", "train.accumulate=2"}}) {
    INFO(keys.front());
    const Keys all = lm_keys(
        text,
        with({"dist.ranks=2", "train.max_steps=24", "train.stop_after=0", "train.eval_every=0.5"}, keys));
    const Ended expected = whole(all);
    const Ended resumed = stopped_and_resumed(all, 14);
    check_same(expected, resumed);
    check_same(expected, stopped_and_resumed(all, 14, "gloo"));
    CHECK(expected.metrics.end->held_out_loss == resumed.metrics.end->held_out_loss);
  }
}

TEST_CASE("the state is carried through an epoch and begins anew with the next") {
  const MadeUpText text;
  BrokenStep::states.clear();
  const Keys keys = lm_keys(text, {"model.name=test_broken_lm", "train.max_steps=40", "train.max_skips=2"});
  const Run run = train("threads", 1, keys);
  const auto& states = BrokenStep::states;
  REQUIRE(states.size() == 40);
  const std::vector<float> zeros(states[0].size(), 0.0f);
  for (std::size_t i = 0; i < states.size(); ++i) {
    INFO("step " << i);
    CHECK((states[i] == zeros) == (i % 19 == 0));
  }
  SECTION("a discarded step leaves the state as it was before") {
    REQUIRE(run.metrics.steps[BrokenStep::kBroken].skipped);
    CHECK(states[BrokenStep::kBroken + 1] == states[BrokenStep::kBroken]);
    CHECK(states[BrokenStep::kBroken + 2] != states[BrokenStep::kBroken + 1]);
  }
}

TEST_CASE(
    "evaluations of a language model count every window once, whatever the ranks, and disturb nothing") {
  const MadeUpText text;
  const Keys keys = lm_keys(text, {"train.max_steps=1", "optimizer.lr=0.0001"});
  const double alone = train("threads", 1, keys).test_loss;
  for (const int ranks : {2, 3, 4})
    CHECK(train("threads", ranks, keys).test_loss == Approx(alone).epsilon(1e-5));
  const Keys longer = lm_keys(text, {"train.max_steps=12", "compress.name=topk"});
  CHECK(train("threads", 2, with(longer, {"train.eval_every=0.25"})).checksums ==
        train("threads", 2, longer).checksums);
}

TEST_CASE("micro-batches go on through the text, and carry the state") {
  const MadeUpText text;
  BrokenStep::states.clear();
  train("threads", 1,
        lm_keys(text, {"model.name=test_broken_lm", "train.max_steps=1", "train.accumulate=3"}));
  REQUIRE(BrokenStep::states.size() == 3);
  CHECK(BrokenStep::states[1] != BrokenStep::states[0]);
  CHECK(BrokenStep::states[2] != BrokenStep::states[1]);
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
  CHECK(contains(status, "validation perplexity"));
  CHECK(contains(status, "tokens/s"));
}

TEST_CASE("models and data that do not go together, and texts that do not fit, are the user's errors") {
  const MadeUpText text;
  const auto refused = [&](const Keys& keys, std::initializer_list<std::string> parts) {
    return says(error_text([&] { train("threads", 1, lm_keys(text, keys)); }), parts);
  };
  CHECK(refused({"model.name=mlp"}, {"model.name: mlp does not read tokens", "lstm_lm"}));
  CHECK(refused({"data.name=synthetic_images", "data.train_size=64", "data.test_size=8"},
                {"model.name: lstm_lm reads tokens", "synthetic_images"}));
  CHECK(refused({"data.sequence_length=390", "data.batch_size=5"},
                {"data.batch_size", "data.sequence_length"}));
  CHECK(refused({"data.shard=by_label"}, {"data.shard", "even"}));
  CHECK(refused({"data.augment=true"}, {"data.augment", "text"}));
}
