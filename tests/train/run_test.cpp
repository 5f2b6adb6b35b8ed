// Whole runs: what all ranks, backends and repeated runs must agree on.
#include <fmt/format.h>

#include "nn/layers/layers.h"
#include "nn/models/model.h"
#include "tests/train/broken_sample.h"
#include "tests/train/dropout_model.h"
#include "tests/train/resumed_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/runner.h"
#include "train/start.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

const std::vector<Keys> kMethods = {
    {"compress.name=topk"},
    {"compress.name=topk", "compress.scope=tensor", "exchange.merge=size:8000"},
    {"compress.name=topk", "compress.scope=model", "compress.dense_1d=false"},
    {"compress.name=topk", "compress.memory=none", "exchange.merge=none"},
    {"compress.name=gaussiank"},
    {"compress.name=gaussiank", "compress.scope=tensor", "compress.capacity=2"},
    {"compress.name=dense", "dist.ordered_sum=true"},
};

int initialised = 0;

// Counts the tensors that are given a value.
ModulePtr make_initialised(ParameterStore& store, const ModelOptions& options) {
  const auto count = [](std::span<float>, const CounterRng&) { ++initialised; };
  auto model = std::make_unique<Sequential>();
  model->add<Flatten>();
  model->add<Linear>(store, "output", options.input.numel(), options.outputs);
  store.add("a", {8, 8}, count);
  store.add("b", {8}, count);
  return model;
}
const bool initialised_registered = (add_model("test_initialised", "of the tests", make_initialised), true);

}  // namespace

TEST_CASE("after 50 steps all ranks hold the same parameters, and threads equal gloo bit for bit") {
  for (const auto& method : kMethods)
    for (int ranks : {1, 2, 4, 8}) {
      INFO(method[0] << " " << method.back() << ", " << ranks << " ranks");
      CHECK(train("threads", ranks, method).checksums == train("gloo", ranks, method).checksums);
    }
  // Convolutions, batch norm and uneven shards.
  const Keys conv{"model.name=resnet20", "data.batch_size=2",  "data.train_size=64", "data.test_size=10",
                  "train.max_steps=4",   "compress.name=topk", "data.shard=uneven:3"};
  CHECK(train("threads", 3, conv).checksums == train("gloo", 3, conv).checksums);
}

TEST_CASE("dense over the library's sum: equal ranks and runs, and threads' result within rounding") {
  for (int ranks : {2, 4, 8}) {
    const Run gloo = train("gloo", ranks, {"compress.name=dense"});
    CHECK(gloo.checksums == train("gloo", ranks, {"compress.name=dense"}).checksums);
    CHECK(gloo.test_loss == Approx(train("threads", ranks, {"compress.name=dense"}).test_loss).epsilon(1e-3));
  }
}

TEST_CASE("a run records its task and what its evaluations measure, the top-5 accuracy too") {
  const Run classes = train("threads", 1, {"train.max_steps=1", "data.classes=3"});
  CHECK(classes.metrics.starts.at(0).task == "synthetic_images, 3 classes, samples [3, 32, 32]");
  CHECK(classes.metrics.starts[0].metric == Metric::accuracy());
  const Run regression = train("threads", 1, {"train.max_steps=1", "data.name=synthetic_regression"});
  CHECK(regression.metrics.starts.at(0).task == "synthetic_regression, 1 target, samples [64, 1, 1]");
  CHECK(regression.metrics.starts[0].metric == Metric::squared_error());
  CHECK(classes.metrics.end->best_test_accuracy);
  CHECK_FALSE(regression.metrics.end->best_test_accuracy);
  // With more than ten classes the top-5 accuracy too.
  const Run eleven = train("threads", 2, {"train.max_steps=8", "data.classes=11", "data.test_size=33"});
  const EvalRecord& last = eleven.metrics.evals.at(0);
  const double top5 = last.test.top5_accuracy.value(), samples = 33 * top5;
  CHECK(top5 > last.test.accuracy.value());
  CHECK(top5 < 1);
  CHECK(samples == Approx(std::round(samples)));
  CHECK(eleven.metrics.end.value().test.top5_accuracy == top5);
  const Run ten = train("threads", 1, {"train.max_steps=1", "data.classes=10"});
  CHECK_FALSE(ten.metrics.end->test.top5_accuracy);
}

TEST_CASE("two runs with one seed give the same parameters, another seed gives others") {
  for (const auto& method : kMethods) {
    const Run run = train("threads", 4, method);
    CHECK(run.checksums == train("threads", 4, method).checksums);
    CHECK(run.checksums != train("threads", 4, with(method, {"seed=2"})).checksums);
  }
}

TEST_CASE("topk at density 1 equals dense: bit for bit with one rank, within rounding with four") {
  const Keys whole{"compress.name=topk", "compress.density=1", "compress.warmup=[]"};
  const Keys dense{"compress.name=dense"};
  CHECK(train("threads", 1, whole).checksums == train("threads", 1, dense).checksums);
  CHECK(train("threads", 4, whole).test_loss == Approx(train("threads", 4, dense).test_loss).epsilon(1e-4));
}

TEST_CASE("micro-batches equal one batch of all, within rounding, and are compressed once, as one step") {
  // One rank, samples in the same order; no batch norm in the model.
  const Run whole = train("threads", 1, {"data.batch_size=8"});
  const Run two = train("threads", 1, {"data.batch_size=4", "train.accumulate=2"});
  CHECK(whole.test_loss == Approx(two.test_loss).epsilon(1e-4));
  CHECK(whole.metrics.steps[0].loss == Approx(two.metrics.steps[0].loss).epsilon(1e-5));
  const Run one = train("threads", 2, {"compress.name=topk"});
  const Run three = train("threads", 2, {"compress.name=topk", "train.accumulate=3"});
  for (const std::size_t step : {0, 20})
    CHECK(three.metrics.steps[step].selected == one.metrics.steps[step].selected);
  CHECK(one.metrics.steps[20].selected > 0);
}

TEST_CASE("dropout leaves out other elements for each rank and micro-batch") {
  // Of one sample: with the same elements left out all three would make the same first step.
  const Keys same{"model.name=test_dropout", "data.name=same_samples", "data.batch_size=1",
                  "train.max_steps=1",       "compress.name=dense",    "optimizer.momentum=0"};
  const std::string one = train("threads", 1, same).checksums[0];
  CHECK(train("threads", 1, with(same, {"train.accumulate=2"})).checksums[0] != one);
  CHECK(train("threads", 2, same).checksums[0] != one);
}

TEST_CASE("clipping before compression bounds the step, over the model and tensor by tensor") {
  const auto loss = [](const Keys& keys) {
    return train("threads", 2, with({"optimizer.weight_decay=0"}, keys)).test_loss;
  };
  const double untrained = loss({"optimizer.lr=1e-30"});
  CHECK(loss({}) != Approx(untrained).epsilon(1e-3));
  // Steps that cannot be longer than this leave the model where it was.
  for (const std::string scope : {"model", "tensor"}) {
    INFO(scope);
    CHECK(loss({"train.clip_local=1e-12", "train.clip_local_scope=" + scope}) ==
          Approx(untrained).epsilon(1e-6));
  }
  // Clipping the average asks for the norm over all groups.
  const Keys clipped{"compress.name=dense", "train.clip_global=0.05"};
  CHECK(train("threads", 2, with(clipped, {"exchange.merge=none"})).test_loss ==
        Approx(train("threads", 2, clipped).test_loss).epsilon(1e-4));
}

TEST_CASE("an epoch's loss is the mean over its steps, and over uneven shards that over all samples") {
  const Run run = train("threads", 2, {"data.train_size=64", "train.max_steps=16"});  // two epochs of 8 steps
  REQUIRE(run.metrics.epochs.size() == 2);
  for (std::size_t epoch = 0; epoch < 2; ++epoch) {
    double sum = 0;
    for (std::size_t i = 0; i < 8; ++i) sum += run.metrics.steps[8 * epoch + i].loss;
    CHECK(run.metrics.epochs[epoch].train_loss == Approx(sum / 8));
  }
  const Keys still{"optimizer.lr=1e-30", "optimizer.weight_decay=0", "data.train_size=32",
                   "data.batch_size=8",  "train.epochs=1",           "train.max_steps=0"};
  const Keys uneven = with(still, {"data.shard=uneven:3"});  // 24 samples once, 8 three times
  CHECK(train("threads", 2, uneven).metrics.epochs[0].train_loss ==
        Approx(train("threads", 1, still).metrics.epochs[0].train_loss).epsilon(1e-5));
}

TEST_CASE("every sample is evaluated once: the result does not depend on the number of ranks") {
  // No step has been done when the learning rate is nearly zero: all runs evaluate the same model.
  const auto loss = [](int ranks) {
    return train("threads", ranks,
                 {"optimizer.lr=1e-30", "optimizer.weight_decay=0", "data.test_size=37", "train.max_steps=1"})
        .test_loss;
  };
  const double alone = loss(1);
  for (const int ranks : {3, 5}) CHECK(loss(ranks) == Approx(alone).epsilon(1e-6));
}

TEST_CASE("a sample that is not a number costs its step and nothing else: the statistics stay sound too") {
  for (const std::string method : {"dense", "topk"}) {
    const Run run = train(
        "threads", 2,
        {"model.name=resnet20", "data.name=broken_sample", "compress.name=" + method, "data.batch_size=4",
         "train.epochs=3", "train.eval_every=1", "train.max_steps=9", "train.max_skips=2"});
    int skipped = 0;
    for (const StepRecord& step : run.metrics.steps) skipped += step.skipped;
    CHECK(skipped == 2);  // once per epoch of four steps
    CHECK(run.metrics.steps.size() == 9);
    for (const EvalRecord& eval : run.metrics.evals) CHECK(std::isfinite(eval.test.loss));
  }
}

TEST_CASE("a run in which no step counted fails, however short it is") {
  const Keys broken = {"data.name=broken_sample", "data.batch_size=32", "dist.ranks=1"};
  for (const char* end : {"train.max_steps=3", "train.stop_after=3"}) {
    const TempFolder temp;
    const LoadedConfig loaded = small_run(temp, with(broken, {end}));
    CHECK_ERROR(run_in_directory(loaded), "no step of the run counted: all 3 were not finite",
                "model.init_from");
    const Metrics metrics = metrics_of(temp);
    CHECK((metrics.stop && metrics.stop->failed));
    CHECK_FALSE(metrics.end);
  }
}

TEST_CASE("a run that has made all its steps fails if an end or many steps were not finite") {
  const auto failed = [](const Keys& keys, const Keys& start_keys, const char* why) {
    const TempFolder temp;
    if (!start_keys.empty()) CHECK(start(temp, with(keys, start_keys), false).stopped);
    const std::string error = error_text([&] { start(temp, keys, !start_keys.empty()); });
    CHECK(says(error, {why, "lower optimizer.lr"}));
    const Metrics metrics = metrics_of(temp);
    REQUIRE(metrics.end);
    CHECK((metrics.end->failed && !metrics.stop));
    CHECK(says(metrics.end->reason, {why}));
    CHECK(says(status_text(temp.at("run")), {"failed at its end: training has diverged", why}));
    CHECK(CheckpointStore(temp.at("run/checkpoints")).steps().back() == metrics.end->steps);
    return metrics;
  };
  const Keys large = {"dist.ranks=2", "optimizer.lr=1e6", "train.max_steps=8", "train.max_skips=100",
                      "train.stop_after=0"};
  failed(large, {}, "the last evaluation was not finite");
  failed(with(large, {"exchange.every=4"}), {}, "the last evaluation was not finite");
  // Once in each of three epochs of four steps, whoever leaves the step out, and whenever the run stopped.
  const Keys broken = {"dist.ranks=2",      "data.name=broken_sample", "data.batch_size=4", "train.epochs=3",
                       "train.max_steps=0", "train.max_skips=2",       "train.stop_after=0"};
  const Metrics metrics =
      failed(broken, {}, "3 of 12 steps were not finite and skipped, more than train.max_skips (2)");
  failed(broken, {"train.stop_after=9"}, "3 of 12 steps");
  failed(with(broken, {"exchange.every=4"}), {}, "3 of 12 steps");
  const auto bad = std::ranges::find(metrics.steps, true, &StepRecord::skipped);
  failed(with(broken, {fmt::format("train.max_steps={}", bad->step)}), {}, "the last step was not finite");
  // One fewer is no failure.
  const TempFolder temp;
  CHECK_NOTHROW(start(temp, with(broken, {"train.max_skips=3"}), false));
  CHECK_FALSE(metrics_of(temp).end->failed);
}

TEST_CASE("a step that is not finite names the first parameter whose gradient is not, by any method") {
  // Of the whole run; rank 0's lines of progress and the bad rank's warning.
  for (const std::string method :
       {"dense", "topk", "dgc", "gaussiank", "powersgd", "qsgd", "signsgd", "regtopk"}) {
    INFO(method);
    const Keys keys{"model.name=mlp",    "data.name=broken_sample", "compress.name=" + method,
                    "data.batch_size=4", "train.epochs=1",          "train.max_skips=1"};
    CHECK_ERROR(train("threads", 2, keys), "on rank ", ", first in the gradient of ");
  }
}

TEST_CASE("the first bad parameter is the first of the arena whose gradient holds NaN or infinity") {
  ParameterStore store;
  for (const char* name : {"a", "b", "c"})
    store.add(name, {4, 4}, [](std::span<float>, const CounterRng&) {});
  store.build([](const Parameter&) { return true; }, 1);
  ParameterArena& arena = store.arena();
  arena.mark_gradients_unwritten();
  for (Parameter* parameter : arena.parameters())
    std::fill_n(parameter->gradient(), parameter->numel(), 1e30f);
  CHECK(first_bad_parameter(arena) == -1);
  arena.parameters()[2]->gradient()[15] = std::numeric_limits<float>::infinity();
  CHECK(first_bad_parameter(arena) == 2);
  arena.parameters()[1]->gradient()[0] = std::numeric_limits<float>::quiet_NaN();
  CHECK(first_bad_parameter(arena) == 1);
}

TEST_CASE("dense gradients may be sent as bfloat16: half the bytes, the same bits on every backend") {
  const Keys settings = {"compress.values=bf16", "dist.ordered_sum=true"};
  const Run threads = train("threads", 2, settings), gloo = train("gloo", 2, settings);
  CHECK(threads.checksums[0] == gloo.checksums[0]);
  CHECK(threads.metrics.end->bytes_sent * 2 == threads.metrics.end->bytes_dense);
  const Run whole = train("threads", 2, {});
  CHECK(threads.checksums[0] != whole.checksums[0]);
  CHECK(threads.test_loss == Approx(whole.test_loss).epsilon(0.02));
}

TEST_CASE("evaluations may come within an epoch, and change nothing of the training") {
  const Keys settings = {"data.train_size=64", "data.batch_size=4", "train.epochs=2",
                         "train.max_steps=0"};  // 8 steps per epoch
  std::set<std::string> checksums;
  for (const auto& [every, expected] : std::map<std::string, std::vector<std::int64_t>>{
           {"0", {16}}, {"0.25", {2, 4, 6, 8, 10, 12, 14, 16}}, {"0.7", {6, 12, 16}}}) {
    const Run run = train("threads", 2, with(settings, {"train.eval_every=" + every}));
    std::vector<std::int64_t> steps;
    for (const EvalRecord& eval : run.metrics.evals) steps.push_back(eval.step);
    INFO(every);
    CHECK(steps == expected);
    checksums.insert(run.metrics.end->parameter_checksum);
  }
  CHECK(checksums.size() == 1);
}

TEST_CASE("the last step of an epoch has the batches that are left, and averages over these") {
  const Keys still = {"optimizer.lr=1e-12", "optimizer.weight_decay=0", "train.epochs=2",
                      "train.max_steps=0",  "data.train_size=144",      "data.shard=uneven:2"};
  const auto losses = [&](const Keys& keys) {
    std::vector<double> losses;
    for (const StepRecord& step : train("threads", 2, with(still, keys)).metrics.steps)
      losses.push_back(step.loss);
    return losses;
  };
  const std::vector<double> one = losses({});
  REQUIRE(one.size() == 2 * 24);  // 96 samples of the first rank in batches of 4
  const Run run = train("threads", 2, with(still, {"train.accumulate=10"}));
  CHECK(run.metrics.starts[0].steps_per_epoch == 3);
  REQUIRE(run.metrics.steps.size() == 6);
  for (std::size_t step = 0; step < 6; ++step) {
    const std::size_t begin = step / 3 * 24 + step % 3 * 10, count = step % 3 == 2 ? 4 : 10;
    double mean = 0;
    for (std::size_t i = begin; i < begin + count; ++i) mean += one[i] / static_cast<double>(count);
    INFO("step " << step);
    CHECK(run.metrics.steps[step].loss == Approx(mean).epsilon(1e-5));
  }
  CHECK(train("gloo", 2, with(still, {"train.accumulate=10", "optimizer.lr=0.02"})).checksums ==
        train("threads", 2, with(still, {"train.accumulate=10", "optimizer.lr=0.02"})).checksums);
  CHECK_THROWS_WITH(train("threads", 2, with(still, {"train.accumulate=25"})),
                    Catch::Contains("train.accumulate: 25") && Catch::Contains("an epoch has 24"));
}

TEST_CASE("a run ends at the first evaluation that reaches its target") {
  const Keys settings = {"data.train_size=256", "train.epochs=20", "train.max_steps=0",
                         "train.eval_every=0.25"};  // 32 steps per epoch
  const Run whole = train("threads", 2, settings);
  const double target = whole.metrics.evals[5].test.accuracy.value();
  std::size_t first = 0;
  while (whole.metrics.evals[first].test.accuracy < target) ++first;
  const Run run =  // of 64 samples: six decimals
      train("threads", 2, with(settings, {"train.target_accuracy=" + std::to_string(target)}));
  const EvalRecord& reached = whole.metrics.evals[first];
  CHECK(run.metrics.evals.size() == first + 1);
  CHECK(run.metrics.evals.back().step == reached.step);
  CHECK(run.metrics.end.value().steps == reached.step);
  CHECK(run.metrics.end->test.accuracy == reached.test.accuracy);
}

TEST_CASE("training that diverges stops with a message and names the step") {
  CHECK_THROWS_WITH(
      train("threads", 2,
            {"optimizer.lr=1e6", "optimizer.weight_decay=1", "train.max_skips=3", "train.check_every=0"}),
      Catch::Contains("diverged") && Catch::Contains("3 steps in a row"));
}

TEST_CASE("a rank's memory counts the moments of its optimizer") {
  for (const auto& [key, buffers] : std::map<std::string, double>{{"optimizer.momentum=0", 3},
                                                                  {"optimizer.momentum=0.9", 4},
                                                                  {"optimizer.name=adamw", 5},
                                                                  {"optimizer.name=muon", 5}}) {
    const Prepared run({key});
    INFO(key);
    CHECK(model_bytes(run.loaded.config, *run.data.train) ==
          4 * buffers * static_cast<double>(run.arena().size()));
  }
}

TEST_CASE("a model that no machine holds, and too many ranks, are refused without memory for them") {
  const TempFolder temp;
  const Config large = small_run(temp, {"model.hidden=[1000000,1000000]"}).config;
  const RunData data = load_data(large);
  CHECK(model_bytes(large, *data.train) > 16e12);
  const RunCheck check = check_run(large, data);
  REQUIRE(check.problems.size() == 1);
  CHECK(says(check.problems[0].message, {"out of memory: the weights", "TB)"}));
  const Config small = small_run(temp, {}).config;
  check_limits(small, data, 2, 1);
  CHECK_USER_ERROR(check_limits(small, data, 1 << 30, 1), "dist.ranks", "this machine", "lower");
}

TEST_CASE("the checks before a run give no weight a value") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"model.name=test_initialised"});
  const RunData data = load_data(loaded.config);
  CHECK(check_run(loaded.config, data).problems.empty());
  check_limits(loaded.config, data, 1, 1);
  CHECK(initialised == 0);
  build_model(loaded.config, *data.train);
  CHECK(initialised == 2);
}
