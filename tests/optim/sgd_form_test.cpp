// SGD on gradients that have momentum or the learning rate in them already, against plain loops in double.
#include <cmath>

#include "nn/base/check.h"
#include "nn/core/rng.h"
#include "optim/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/fill_normal.h"

using namespace topknot;

namespace {

// A matrix, then a vector, which does not decay.
struct Model {
  ParameterStore store;
  ParameterArena* arena;
  std::size_t matrix = 41 * 11;
  Model() {
    store.add("weight", {41, 11}, fill_normal);
    store.add("bias", {19}, fill_normal);
    arena = &store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  }
};

std::vector<float> gradient_of_step(std::size_t size, std::uint32_t step) {
  std::vector<float> gradient(size);
  fill_normal(gradient, CounterRng(3, RngUse::test, step));
  return gradient;
}

void check_close(std::span<const float> weights, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO("element " << i);
    REQUIRE(weights[i] == Approx(expected[i]).epsilon(2e-6).margin(2e-6));
  }
}

}  // namespace

TEST_CASE("where the gradient has momentum, the optimizer's is for weight decay alone") {
  OptimizerOptions o;
  o.lr = 0.05;
  o.momentum = GENERATE(0.0, 0.9);
  o.nesterov = GENERATE(false, true);
  o.weight_decay = GENERATE(0.0, 0.1);
  const double scale = GENERATE(1.0, 0.25);
  if (o.nesterov && o.momentum == 0) return;  // no such optimizer
  Model model;
  const auto optimizer = make_optimizer(o, *model.arena);
  const auto weights = model.arena->weights();
  std::vector<double> w(weights.begin(), weights.end()), b(w.size(), 0.0);
  for (std::uint32_t step = 0; step < 6; ++step) {
    const std::vector<float> g = gradient_of_step(w.size(), step);
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double d = i < model.matrix ? o.weight_decay * w[i] : 0.0;
      b[i] = step == 0 ? d : o.momentum * b[i] + d;  // the code's first step
      w[i] -= o.lr * ((o.nesterov ? d + o.momentum * b[i] : b[i]) + g[i] * scale);
    }
    optimizer->update(0, g, {step, o.lr, scale}, Applied::momentum);
  }
  check_close(weights, w);
}

TEST_CASE("without decay, a gradient that has momentum is stepped along as it is") {
  OptimizerOptions o;
  o.momentum = 0.9;
  Model model;
  const auto optimizer = make_optimizer(o, *model.arena);
  std::vector<float> w(model.arena->weights().begin(), model.arena->weights().end());
  for (std::uint32_t step = 0; step < 3; ++step) {
    const std::vector<float> g = gradient_of_step(w.size(), step);
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 0.5f * g[i];
    optimizer->update(0, g, {step, 0.5}, Applied::momentum);
  }
  for (std::size_t i = 0; i < w.size(); ++i) REQUIRE(model.arena->weights()[i] == w[i]);
}

TEST_CASE("slices of one step may differ in form: dense ones keep the optimizer's momentum") {
  OptimizerOptions o;
  o.lr = 0.1, o.momentum = 0.9, o.weight_decay = 0.01;
  Model model;
  const auto optimizer = make_optimizer(o, *model.arena);
  const auto weights = model.arena->weights();
  std::vector<double> w(weights.begin(), weights.end()), b(w.size(), 0.0);
  for (std::uint32_t step = 0; step < 5; ++step) {
    const std::vector<float> g = gradient_of_step(w.size(), step);
    for (std::size_t i = 0; i < w.size(); ++i) {
      const bool compressed = i < model.matrix;
      b[i] = o.momentum * b[i] + (compressed ? o.weight_decay * w[i] : g[i]);
      w[i] -= o.lr * (b[i] + (compressed ? g[i] : 0.0));
    }
    const std::span<const float> all = g;
    optimizer->update(0, all.first(model.matrix), {step, o.lr}, Applied::momentum);
    optimizer->update(model.matrix, all.subspan(model.matrix), {step, o.lr}, Applied::nothing);
  }
  check_close(weights, w);
}

TEST_CASE("where the gradient has the learning rate, only weight decay takes it") {
  OptimizerOptions o;
  o.lr = 0.05;
  o.weight_decay = GENERATE(0.0, 0.1);
  const double scale = GENERATE(1.0, 0.25);
  Model model;
  const auto optimizer = make_optimizer(o, *model.arena);
  const auto weights = model.arena->weights();
  std::vector<double> w(weights.begin(), weights.end());
  for (std::uint32_t step = 0; step < 6; ++step) {
    const double lr = o.lr / (step + 1);
    const std::vector<float> g = gradient_of_step(w.size(), step);
    for (std::size_t i = 0; i < w.size(); ++i)
      w[i] -= g[i] * scale + (i < model.matrix ? lr * o.weight_decay * w[i] : 0.0);
    optimizer->update(0, g, {step, lr, scale}, Applied::learning_rate);
  }
  check_close(weights, w);
  OptimizerOptions with_momentum;
  with_momentum.momentum = 0.9;
  const auto other = make_optimizer(with_momentum, *model.arena);
  CHECK_THROWS_AS(other->update(0, gradient_of_step(w.size(), 0), {0, 0.1}, Applied::learning_rate), Error);
}
