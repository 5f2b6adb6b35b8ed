// Operations and activations that --dry-run counts, against values counted by hand.
#include "train/plan/step_cost.h"

#include "nn/core/pass_cost.h"
#include "tests/support/variables.h"
#include "tests/train/made_up_text.h"
#include "train/evaluate.h"

using namespace topknot;

namespace {

StepCost cost_of(const std::vector<std::string>& keys) {
  const LoadedConfig loaded = load_config("", keys);
  REQUIRE(loaded.problems.empty());
  const RunData data = load_data(loaded.config);
  const auto model = build_model(loaded.config, *data.train);
  return count_step_cost(loaded.config, *data.train, *model,
                         stand_in_options(loaded.config, model->store.arena()));
}

// Of one image: 2 per multiply-add of a convolution whose output has `size` x `size` pixels.
double convolution(double in, double out, double kernel, double size) {
  return 2 * in * out * kernel * kernel * size * size;
}

// The peak of one pass over a whole batch.
double measured_activations(const std::vector<std::string>& keys) {
  const Config config = load_config("", keys).config;
  const RunData data = load_data(config);
  const auto model = build_model(config, *data.train);
  LoaderOptions options = loader_options(config, *data.train, true, 0, 1);
  options.workers = 0;
  Loader loader(*data.train, options);
  loader.start_epoch(0);
  Batch batch;
  REQUIRE(loader.next(batch));
  const PassCost cost;
  backward(batch_loss(model->module->forward(Variable(batch.images), ForwardContext()), view_of(batch, {})));
  return static_cast<double>(cost.peak_bytes());
}

const std::vector<std::string> kSmall = {"data.train_size=64", "data.test_size=8", "train.threads=1"};

std::vector<std::string> small(std::vector<std::string> keys) {
  keys.insert(keys.end(), kSmall.begin(), kSmall.end());
  return keys;
}

}  // namespace

TEST_CASE("operations of a step are those counted by hand: mlp, lenet, resnet20") {
  SECTION("mlp: the pictures want no gradient; three batches of 10 make a step") {
    const StepCost cost =
        cost_of(small({"model.name=mlp", "model.hidden=[24]", "data.batch_size=10", "train.accumulate=3"}));
    const double first = 2.0 * 3072 * 24, last = 2.0 * 24 * 10;
    CHECK(cost.forward_flops == Approx(30 * (first + last)));
    CHECK(cost.backward_flops == Approx(30 * (first + 2 * last)));
  }
  SECTION("lenet") {
    const StepCost cost = cost_of(small({"model.name=lenet", "data.batch_size=16"}));
    const double first = convolution(3, 6, 5, 32);
    const double others = convolution(6, 16, 5, 12) + 2.0 * (16 * 36 * 120 + 120 * 84 + 84 * 10);
    CHECK(cost.forward_flops == Approx(16 * (first + others)));
    CHECK(cost.backward_flops == Approx(16 * (first + 2 * others)));
  }
  SECTION("resnet20: 40.55 million multiply-adds per image") {
    const StepCost cost = cost_of(small({"model.name=resnet20", "data.batch_size=8"}));
    const double first = convolution(3, 16, 3, 32);
    const double others = 6 * convolution(16, 16, 3, 32) + convolution(16, 32, 3, 16) +
                          5 * convolution(32, 32, 3, 16) + convolution(32, 64, 3, 8) +
                          5 * convolution(64, 64, 3, 8) + 2 * 64 * 10;
    CHECK((first + others) / 2 == Approx(40.55e6).epsilon(1e-3));
    CHECK(cost.forward_flops == Approx(8 * (first + others)));
    CHECK(cost.backward_flops == Approx(8 * (first + 2 * others)));
  }
  SECTION("a frozen layer has no weight gradient") {
    const StepCost cost = cost_of(
        small({"model.name=mlp", "model.hidden=[24]", "model.freeze=[hidden1.*]", "data.batch_size=1"}));
    CHECK(cost.backward_flops == Approx(2.0 * 24 * 10));
  }
}

TEST_CASE("operations and activations of a language model are those counted by hand") {
  const testing::MadeUpText text;  // 26 words
  const std::vector<std::string> keys{
      "data.name=text",     "data.root=" + text.root(), "data.sequence_length=6", "data.batch_size=8",
      "model.name=lstm_lm", "model.width=32",           "model.layers=2",         "model.dropout=0",
      "train.accumulate=2", "train.threads=1"};
  const StepCost cost = cost_of(keys);
  const double tokens = 2 * 8 * 6, layers = 2 * 2.0 * 128 * 64, output = 2.0 * 26 * 32;
  CHECK(cost.forward_flops == Approx(tokens * (layers + output)));
  CHECK(cost.backward_flops == Approx(2 * cost.forward_flops));
  CHECK(cost.activations == Approx(measured_activations(keys)).epsilon(0.05));
}

TEST_CASE("activations are those that a pass over the whole batch holds") {
  const testing::Threads one(1);  // what others allocate is not counted
  for (const std::vector<std::string>& keys :
       {small({"model.name=mlp", "data.batch_size=32"}), small({"model.name=lenet", "data.batch_size=32"}),
        small({"model.name=resnet20", "data.batch_size=32"}), small({"data.batch_size=3"})}) {
    INFO(keys[0]);
    CHECK(cost_of(keys).activations == Approx(measured_activations(keys)).epsilon(0.05));
  }
  // Each of the 19 convolutions keeps what batch norm reads and what the next layer does.
  const double outputs = 7 * 16 * 32 * 32 + 6 * 32 * 16 * 16 + 6 * 64 * 8 * 8;
  CHECK(cost_of(small({"model.name=resnet20", "data.batch_size=32"})).activations ==
        Approx(32 * 2 * 4 * outputs).epsilon(0.1));
}

TEST_CASE("the state of optimizer and method counts what each carries") {
  const double whole = 4.0 * 269722, compressible = 4.0 * 268336;
  CHECK(cost_of(small({})).optimizer == whole);
  CHECK(cost_of(small({"optimizer.momentum=0"})).optimizer == 0);
  CHECK(cost_of(small({"compress.name=topk"})).method < 1000);
  // dgc: a velocity for each compressed element.
  CHECK(cost_of(small({"compress.name=dgc"})).method == Approx(compressible).epsilon(0.01));
}
