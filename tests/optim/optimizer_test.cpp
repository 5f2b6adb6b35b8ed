// Optimizers, and clipping.
#include "optim/optimizer.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"
#include "optim/clip.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/fill_normal.h"
#include "tests/support/threads.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// Compressible matrices first, then the two 1-D parameters.
struct Model {
  ParameterStore store;
  ParameterArena* arena;
  std::size_t matrices;  // elements
  explicit Model(std::int64_t wide = 37) : matrices(std::size_t(21 + wide * 11)) {
    store.add("a.weight", {3, 7}, fill_normal);
    store.add("a.bias", {5}, fill_normal);
    store.add("b.weight", {wide, 11}, fill_normal);
    store.add("b.scale", {3}, fill_normal);
    arena = &store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  }
  const Parameter& at(std::size_t element) const {
    for (const Parameter* p : arena->parameters())
      if (element < p->offset() + p->numel()) return *p;
    throw Error("no such element");
  }
};

// The rule in double, an element at a time; the learning rate falls from step to step.
std::vector<double> by_formula(const Model& model, const OptimizerOptions& o, Applied applied, int steps,
                               double gradient_scale) {
  const auto weights = model.arena->weights();
  std::vector<double> w(weights.begin(), weights.end()), b(w.size(), 0.0);
  for (int step = 0; step < steps; ++step) {
    const double lr = o.lr / (step + 1);
    const auto gradient = gradient_of_step(w.size(), step);
    for (std::size_t i = 0; i < w.size(); ++i) {
      const bool decays = o.decay_1d || model.at(i).shape().rank() > 1;
      const double g = gradient[i] * gradient_scale, decay = decays ? o.weight_decay * w[i] : 0.0;
      const double d =
          applied == Applied::nothing ? g + decay : decay;  // what takes the optimizer's momentum
      b[i] = step == 0 ? d : o.momentum * b[i] + d;         // PyTorch's first step
      w[i] -= lr * (o.nesterov ? d + o.momentum * b[i] : b[i]);
      if (applied == Applied::momentum) w[i] -= lr * g;
      if (applied == Applied::learning_rate) w[i] -= g;
    }
  }
  return w;
}

void check_close(std::span<const float> weights, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO("element " << i);
    REQUIRE(weights[i] == Approx(expected[i]).epsilon(2e-6).margin(2e-6));
  }
}

}  // namespace

TEST_CASE("SGD follows the formula in double: momentum, Nesterov, decay, what a gradient has in it already") {
  OptimizerOptions o;
  o.lr = 0.05;
  const Applied applied = GENERATE(Applied::nothing, Applied::momentum, Applied::learning_rate);
  o.momentum = GENERATE(0.0, 0.9);
  o.nesterov = GENERATE(false, true);
  o.weight_decay = GENERATE(0.0, 0.1);
  o.decay_1d = GENERATE(false, true);
  const double gradient_scale = GENERATE(1.0, 0.25);
  if (o.nesterov && o.momentum == 0) return;  // no such optimizer
  Model model;
  const auto optimizer = make_optimizer(o, *model.arena);
  CHECK(optimizer->state().empty() == (o.momentum == 0));
  const std::vector<float> first = gradient_of_step(model.arena->size(), 0);
  if (applied == Applied::learning_rate && o.momentum != 0) {
    CHECK_THROWS_AS(optimizer->update(0, first, {0, o.lr}, applied), Error);
    return;
  }
  const auto expected = by_formula(model, o, applied, 6, gradient_scale);
  for (int step = 0; step < 6; ++step)
    optimizer->update(0, gradient_of_step(first.size(), step), {step, o.lr / (step + 1), gradient_scale},
                      applied);
  check_close(model.arena->weights(), expected);
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
      const bool compressed = i < model.matrices;
      b[i] = o.momentum * b[i] + (compressed ? o.weight_decay * w[i] : g[i]);
      w[i] -= o.lr * (b[i] + (compressed ? g[i] : 0.0));
    }
    const std::span<const float> all = g;
    optimizer->update(0, all.first(model.matrices), {step, o.lr}, Applied::momentum);
    optimizer->update(model.matrices, all.subspan(model.matrices), {step, o.lr}, Applied::nothing);
  }
  check_close(weights, w);
}

TEST_CASE("SGD gives the same bits for any cut into slices and any number of threads") {
  OptimizerOptions o;
  o.momentum = 0.9, o.nesterov = true, o.weight_decay = 1e-3;
  Model whole(20000), sliced(20000);
  auto first = make_optimizer(o, *whole.arena), second = make_optimizer(o, *sliced.arena);
  const std::size_t size = whole.arena->size();
  for (int step = 0; step < 3; ++step) {
    const auto gradient = gradient_of_step(size, step);
    {
      const testing::Threads one(1);
      first->update(0, gradient, {step, 0.1});
    }
    const testing::Threads three(3);
    const std::size_t cuts[] = {0, 3, 100001, size - 4, size};
    for (int cut = 3; cut >= 0; --cut)
      second->update(cuts[cut], std::span(gradient).subspan(cuts[cut], cuts[cut + 1] - cuts[cut]),
                     {step, 0.1});
  }
  CHECK(std::memcmp(whole.arena->weights().data(), sliced.arena->weights().data(), size * sizeof(float)) ==
        0);
}

TEST_CASE("a bad status changes neither weights nor the optimizer's state on a CPU") {
  for (const char* name : {"sgd", "adamw", "muon"}) {
    INFO(name);
    OptimizerOptions o;
    o.name = name, o.momentum = 0.9;
    Model model;
    const auto optimizer = make_optimizer(o, *model.arena);
    const auto before = parameter_checksum(model.arena->weights());
    const auto gradient = gradient_of_step(model.arena->size(), 1);
    StepParameters step{0, 0.1};
    StepStatus status;
    status.bad = 1;
    optimizer->update(0, gradient, StepState{&step, &status});
    CHECK(parameter_checksum(model.arena->weights()) == before);
    for (const std::span<float> state : optimizer->state())
      CHECK(std::all_of(state.begin(), state.end(), [](float value) { return value == 0; }));
    status.bad = 0;
    optimizer->update(0, gradient, StepState{&step, &status});
    CHECK(parameter_checksum(model.arena->weights()) != before);
  }
}

TEST_CASE("sign steps by the sign alone, and matrices decay") {
  Model model;
  OptimizerOptions o;
  o.name = "sign", o.weight_decay = 0.5;
  const auto optimizer = make_optimizer(o, *model.arena);
  const std::span<float> weights = model.arena->weights();
  const std::vector<float> before(weights.begin(), weights.end());
  std::vector<float> gradient = gradient_of_step(weights.size(), 3);
  for (std::size_t i = 0; i < gradient.size(); i += 3) gradient[i] = i % 2 == 0 ? 0.0f : -0.0f;
  StepParameters step;
  step.lr = 0.25;
  optimizer->update(0, gradient, step);
  for (const Parameter* p : model.arena->parameters())
    for (std::size_t i = p->offset(); i < p->offset() + p->numel(); ++i) {
      const float sign = gradient[i] > 0 ? 1.0f : gradient[i] < 0 ? -1.0f : 0.0f;
      const float keep = p->shape().rank() > 1 ? 1 - 0.25f * 0.5f : 1.0f;
      CHECK(weights[i] == keep * before[i] - 0.25f * sign);
    }
  CHECK(optimizer->state().empty());
}

TEST_CASE("a slice outside the arena is an error, and nothing is updated") {
  Model model;
  auto optimizer = make_optimizer({}, *model.arena);
  const auto before = parameter_checksum(model.arena->weights());
  const std::vector<float> gradient(5, 1.0f);
  CHECK_THROWS_AS(optimizer->update(model.arena->size() - 4, gradient, {0, 0.1}), Error);
  CHECK(parameter_checksum(model.arena->weights()) == before);
}

TEST_CASE("optimizer options that make no sense name their key") {
  Model model;
  const auto refused = [&](const char* key, void (*set)(OptimizerOptions&)) {
    OptimizerOptions options;
    set(options);
    return user_error([&] { make_optimizer(options, *model.arena); }, {key});
  };
  CHECK(refused("sgd", [](auto& o) { o.name = "sdg"; }));
  CHECK(refused("optimizer.lr", [](auto& o) { o.lr = 0; }));
  CHECK(refused("optimizer.lr", [](auto& o) { o.lr = std::nan(""); }));
  CHECK(refused("optimizer.momentum", [](auto& o) { o.momentum = 1; }));
  CHECK(refused("optimizer.weight_decay", [](auto& o) { o.weight_decay = -1e-4; }));
  CHECK(refused("optimizer.nesterov", [](auto& o) { o.nesterov = true; }));  // without momentum
}

namespace {

OptimizerOptions adamw_options() {
  OptimizerOptions options;
  options.name = "adamw";
  options.weight_decay = 0.1;
  return options;
}

}  // namespace

TEST_CASE("adamw agrees with its formula, in any slices, decay of matrices alone or of all") {
  for (const bool decay_1d : {false, true})
    for (const std::int64_t rows : {std::int64_t{7}, std::int64_t{7000}}) {
      Model model(rows);
      ParameterArena& arena = *model.arena;
      OptimizerOptions options = adamw_options();
      options.decay_1d = decay_1d;
      options.set("beta1", 0.8), options.set("beta2", 0.99), options.set("epsilon", 1e-3);
      const auto optimizer = make_optimizer(options, arena);
      const auto weights = arena.weights();
      std::vector<double> w(weights.begin(), weights.end()), m(w.size()), v(w.size());
      for (std::int64_t step = 0; step < 8; ++step) {
        const double lr = 0.05 / double(1 + step), scale = step == 3 ? 0.25 : 1;
        const auto gradient = gradient_of_step(w.size(), std::uint32_t(step));
        const double t = double(step + 1);
        for (std::size_t i = 0; i < w.size(); ++i) {
          const double g = scale * gradient[i];
          if (i < model.matrices || decay_1d) w[i] -= lr * options.weight_decay * w[i];
          m[i] = 0.8 * m[i] + 0.2 * g;
          v[i] = 0.99 * v[i] + 0.01 * g * g;
          w[i] -= lr * (m[i] / (1 - std::pow(0.8, t))) / (std::sqrt(v[i] / (1 - std::pow(0.99, t))) + 1e-3);
        }
        const std::span<const float> all = gradient;
        optimizer->update(50, all.subspan(50), {step, lr, scale});
        optimizer->update(0, all.first(50), {step, lr, scale});
      }
      double worst = 0;
      for (std::size_t i = 0; i < w.size(); ++i) worst = std::max(worst, std::abs(weights[i] - w[i]));
      CHECK(worst < 1e-5);
      CHECK(optimizer->state().size() == 2);
      CHECK_THROWS_AS(optimizer->update(0, std::vector<float>(w.size() + 1), {0, 0.1}), Error);
    }
}

TEST_CASE("the moments of adamw, and of muon's AdamW, are those of doubles for betas near 1") {
  for (const std::string name : {"adamw", "muon"}) {
    INFO(name);
    Model model;
    ParameterArena& arena = *model.arena;
    OptimizerOptions options = adamw_options();
    options.name = name, options.set("beta1", 0.9999), options.set("beta2", 0.999999);
    const auto optimizer = make_optimizer(options, arena);
    const auto gradient = gradient_of_step(arena.weights().size(), 0);
    std::vector<double> m(gradient.size()), v(gradient.size());
    for (std::int64_t step = 0; step < 3; ++step) {
      optimizer->update(0, gradient, {step, 0.01, 1});
      for (std::size_t i = 0; i < m.size(); ++i) {
        m[i] = 0.9999 * m[i] + (1 - 0.9999) * gradient[i];
        v[i] = 0.999999 * v[i] + (1 - 0.999999) * gradient[i] * gradient[i];
      }
    }
    const auto state = optimizer->state();
    for (const Parameter* parameter : arena.parameters()) {
      if (name == "muon" && parameter->shape().rank() > 1) continue;
      for (std::size_t i = parameter->offset(); i < parameter->offset() + parameter->numel(); ++i) {
        CHECK(state[0][i] == Approx(m[i]).epsilon(1e-6));
        CHECK(state[1][i] == Approx(v[i]).epsilon(1e-6));
      }
    }
  }
}

TEST_CASE("options of adamw out of range are the user's errors, and only plain gradients are taken") {
  Model model;
  OptimizerOptions options = adamw_options();
  CHECK(optimizers().find("adamw").takes(Applied::nothing));
  CHECK_FALSE(optimizers().find("adamw").takes(Applied::momentum));
  CHECK_FALSE(optimizers().find("adamw").takes(Applied::learning_rate));
  options.set("beta2", 1);
  CHECK(user_error([&] { make_optimizer(options, *model.arena); }, {"optimizer.beta2", "0.999999, not 1"}));
  options.set("beta2", 0.9);
  options.set("epsilon", 0);
  CHECK(user_error([&] { make_optimizer(options, *model.arena); }, {"optimizer.epsilon", "above 0"}));
}

namespace {

// By torch.optim.SGD and AdamW of PyTorch 2.15: one parameter [1, 5], w_i = (i - 2) / 2 at first, gradient
// sin(1 + i + 3 t) (i + 1), learning rate 0.1 / (1 + t), weight decay 0.1.
std::vector<float> after_six_steps(const OptimizerOptions& options) {
  ParameterStore store;
  store.add("weight", {1, 5}, [](std::span<float> values, const CounterRng&) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = (float(i) - 2) / 2;
  });
  ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
  const auto optimizer = make_optimizer(options, arena);
  for (int t = 0; t < 6; ++t) {
    std::vector<float> gradient;
    for (int i = 0; i < 5; ++i) gradient.push_back(float(std::sin(1 + i + 3 * t) * (i + 1)));
    optimizer->update(0, gradient, {t, 0.1 / (1 + t)});
  }
  return {arena.weights().begin(), arena.weights().end()};
}

void check_equal(const std::vector<float>& actual, const std::vector<double>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(actual[i] == Approx(expected[i]).margin(2e-6));
}

}  // namespace

TEST_CASE("SGD with momentum, Nesterov's too, and AdamW make PyTorch's steps") {
  OptimizerOptions options;
  options.momentum = 0.9, options.weight_decay = 0.1;
  check_equal(after_six_steps(options), {-1.0632957, -0.7050453, -0.027572, 0.896603, 1.5646321});
  options.nesterov = true;
  check_equal(after_six_steps(options), {-1.0877641, -0.7742932, -0.0261821, 1.046288, 1.7585392});
  options = {};
  options.name = "adamw", options.weight_decay = 0.1;
  check_equal(after_six_steps(options), {-1.0895883, -0.5949361, -0.0877359, 0.6033455, 1.0836763});
}

TEST_CASE("the norm agrees with a plain double sum and has the same bits for any number of threads") {
  for (std::size_t size : {0u, 1u, 15u, 17u, 8192u, 300007u}) {
    std::vector<float> values(size);
    const CounterRng rng(1, RngUse::test, 0);
    double squares = 0;
    std::vector<double> sums;
    for (std::size_t i = 0; i < size; ++i)
      values[i] = rng.normal(i), squares += double(values[i]) * values[i];
    for (const int threads : {1, 3}) {
      const testing::Threads scope(threads);
      sums.push_back(sum_of_squares(values));
    }
    CHECK(sums[0] == sums[1]);
    CHECK(sums[0] == Approx(squares).epsilon(1e-12));
  }
}

TEST_CASE("scaling by the factor keeps the direction and meets the norm") {
  std::vector<float> values(70000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i % 2 ? -3.0f : 4.0f;
  scale(values, clip_factor(l2_norm(values), 5));
  CHECK(l2_norm(values) == Approx(5));
  CHECK(values[69998] / values[69999] == Approx(-4.0 / 3));
}

TEST_CASE("what is no longer than the norm, and what is not finite, is clipped by nothing") {
  CHECK(clip_factor(5, 5) == 1);
  CHECK(clip_factor(std::numeric_limits<double>::infinity(), 1) == 1);
  CHECK(clip_factor(std::nan(""), 1) == 1);
  CHECK(clip_factor(4, 1) == 0.25);
}

TEST_CASE("a clipping norm of 0 or less is refused") {
  for (const double norm : {0, -1}) CHECK_THROWS_AS(clip_factor(1, norm), UserError);
}
