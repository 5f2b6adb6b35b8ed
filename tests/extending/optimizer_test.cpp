// The worked example of an optimizer (docs/examples/adamw.cpp): against its formula in float64, and in a run.
#include <cmath>

#include "nn/core/rng.h"
#include "optim/optimizer.h"
#include "tests/support/catch.h"
#include "tests/train/small_run.h"

using namespace topknot;

namespace {

void normal(std::span<float> values, const CounterRng& rng) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = rng.normal(i);
}

}  // namespace

TEST_CASE("the example optimizer agrees with the formula, in any slices, decay of matrices alone") {
  ParameterStore store;
  store.add("weight", {7, 11}, normal);
  store.add("bias", {11}, normal);
  ParameterArena& arena = store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  OptimizerOptions options;
  options.name = "adamw";
  options.weight_decay = 0.1;
  const auto optimizer = make_optimizer(options, arena);
  const auto weights = arena.weights();
  std::vector<double> w(weights.begin(), weights.end()), m(w.size()), v(w.size());
  for (std::int64_t step = 0; step < 8; ++step) {
    const double lr = 0.05 / static_cast<double>(1 + step), scale = step == 3 ? 0.25 : 1;
    std::vector<float> gradient(w.size());
    normal(gradient, CounterRng(2, RngUse::test, static_cast<std::uint32_t>(step)));
    const double t = static_cast<double>(step + 1);
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = scale * gradient[i];
      if (i < 77) w[i] -= lr * options.weight_decay * w[i];
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.999 * v[i] + 0.001 * g * g;
      w[i] -= lr * (m[i] / (1 - std::pow(0.9, t))) / (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-8);
    }
    const std::span<const float> all = gradient;
    optimizer->update(50, all.subspan(50), {step, lr, scale});
    optimizer->update(0, all.first(50), {step, lr, scale});
  }
  for (std::size_t i = 0; i < w.size(); ++i) CHECK(weights[i] == Approx(w[i]).margin(1e-5));
  CHECK(optimizer->state().size() == 2);
  CHECK_THROWS_AS(optimizer->update(0, std::vector<float>(w.size() + 1), {0, 0.1}), Error);
}

TEST_CASE("a run takes the example optimizer by its name, and momentum is refused") {
  const auto run = testing::train("threads", 2,
                                  {"optimizer.name=adamw", "optimizer.lr=0.002", "optimizer.momentum=0",
                                   "data.train_size=64", "train.max_steps=160"});
  double first = 0, last = 0;  // of 20 epochs, mean losses
  for (int step = 0; step < 8; ++step) {
    first += run.metrics.steps.at(step).loss / 8;
    last += run.metrics.steps.at(152 + step).loss / 8;
  }
  CHECK(last < 0.5 * first);
  ParameterStore store;
  store.add("weight", {2, 2}, normal);
  ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
  OptimizerOptions options;
  options.name = "adamw";
  options.momentum = 0.9;
  CHECK_THROWS_AS(make_optimizer(options, arena), UserError);
}
