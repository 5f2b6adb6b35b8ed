// The worked example of an optimizer (docs/examples/lion.cpp): against its formula in float64, and in a run.

#include "optim/optimizer.h"
#include "nn/core/rng.h"
#include "tests/support/fill_normal.h"
#include "tests/train/small_run.h"

using namespace topknot;

TEST_CASE("the example optimizer agrees with the formula, in any slices, decay of matrices alone") {
  ParameterStore store;
  store.add("weight", {7, 11}, fill_normal);
  store.add("bias", {11}, fill_normal);
  ParameterArena& arena = store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  OptimizerOptions options;
  options.name = "lion";
  options.weight_decay = 0.1;
  const auto optimizer = make_optimizer(options, arena);
  const auto weights = arena.weights();
  std::vector<double> w(weights.begin(), weights.end()), m(w.size());
  for (std::int64_t step = 0; step < 8; ++step) {
    const double lr = 0.05 / static_cast<double>(1 + step), scale = step == 3 ? 0.25 : 1;
    std::vector<float> gradient(w.size());
    fill_normal(gradient, CounterRng(2, RngUse::test, static_cast<std::uint32_t>(step)));
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = scale * gradient[i], u = 0.9 * m[i] + 0.1 * g;
      w[i] -= lr * ((u > 0) - (u < 0) + (i < 77 ? options.weight_decay * w[i] : 0));
      m[i] = 0.99 * m[i] + 0.01 * g;
    }
    const std::span<const float> all = gradient;
    optimizer->update(50, all.subspan(50), {step, lr, scale});
    optimizer->update(0, all.first(50), {step, lr, scale});
  }
  for (std::size_t i = 0; i < w.size(); ++i) CHECK(weights[i] == Approx(w[i]).margin(1e-5));
  CHECK(optimizer->state().size() == 1);
  CHECK_THROWS_AS(optimizer->update(0, std::vector<float>(w.size() + 1), {0, 0.1}), Error);
}

TEST_CASE("a run takes the example optimizer by its name, and gradients with momentum in them are refused") {
  const testing::Keys keys{"optimizer.name=lion", "optimizer.lr=0.0005", "data.train_size=64",
                           "train.max_steps=160"};
  const auto run = testing::train("threads", 2, keys);
  double first = 0, last = 0;  // of 20 epochs, mean losses
  for (int step = 0; step < 8; ++step) {
    first += run.metrics.steps.at(step).loss / 8;
    last += run.metrics.steps.at(152 + step).loss / 8;
  }
  CHECK(last < 0.5 * first);
  const TempFolder temp;
  testing::Keys with_momentum = keys;
  with_momentum.push_back("compress.name=dgc");
  const LoadedConfig loaded = testing::small_run(temp, with_momentum);
  const auto problems = check_run(loaded.config, load_data(loaded.config)).problems;
  REQUIRE(problems.size() == 1);
  CHECK(problems[0].message.find(
            "optimizer.name: lion takes plain gradients, and compress.name=dgc has put the momentum") !=
        std::string::npos);
}

TEST_CASE("a configuration is checked without making the optimizer, whose state may be large") {
  optimizers().add("test_never_made", "refuses to be made",
                   {.make = [](const OptimizerOptions&, ParameterArena&) -> std::unique_ptr<Optimizer> {
                     throw Error("made");
                   }});
  const TempFolder temp;
  const LoadedConfig loaded = testing::small_run(temp, {"optimizer.name=test_never_made"});
  for (const Problem& problem : check_run(loaded.config, load_data(loaded.config)).problems)
    FAIL(problem.message);
}
