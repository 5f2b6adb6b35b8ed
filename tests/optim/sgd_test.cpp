#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "nn/core/rng.h"
#include "optim/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/fill_normal.h"

using namespace topknot;

namespace {

// Compressible matrices first, then the two 1-D parameters.
struct Model {
  ParameterStore store;
  ParameterArena* arena;
  explicit Model(std::int64_t wide = 37) {
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

std::vector<float> gradient_of_step(std::size_t size, std::uint32_t step) {
  std::vector<float> gradient(size);
  fill_normal(gradient, CounterRng(2, RngUse::test, step));
  return gradient;
}

// The plain formula in double, an element at a time.
std::vector<double> reference(const Model& model, const OptimizerOptions& o, int steps,
                              double gradient_scale) {
  const auto weights = model.arena->weights();
  std::vector<double> w(weights.begin(), weights.end()), b(w.size(), 0.0);
  for (int step = 0; step < steps; ++step) {
    const auto gradient = gradient_of_step(w.size(), step);
    for (std::size_t i = 0; i < w.size(); ++i) {
      const bool decays = o.decay_1d || model.at(i).shape().rank() > 1;
      const double d = gradient[i] * gradient_scale + (decays ? o.weight_decay * w[i] : 0.0);
      b[i] = step == 0 ? d : o.momentum * b[i] + d;  // PyTorch's first step
      w[i] -= o.lr * (o.momentum == 0 ? d : o.nesterov ? d + o.momentum * b[i] : b[i]);
    }
  }
  return w;
}

}  // namespace

TEST_CASE("SGD follows the plain formula in double, with momentum, Nesterov and decay") {
  OptimizerOptions o;
  o.lr = 0.05;
  double gradient_scale = 1;
  SECTION("plain") {}
  SECTION("momentum") {
    o.momentum = 0.9;
  }
  SECTION("Nesterov") {
    o.momentum = 0.9, o.nesterov = true;
  }
  SECTION("decay, not of 1-D parameters") {
    o.momentum = 0.9, o.weight_decay = 0.1;
  }
  SECTION("decay of all") {
    o.weight_decay = 0.1, o.decay_1d = true;
  }
  SECTION("everything") {
    o.momentum = 0.8, o.nesterov = true, o.weight_decay = 0.1, gradient_scale = 0.25;
  }
  Model model;
  auto optimizer = make_optimizer(o, *model.arena);
  const auto expected = reference(model, o, 5, gradient_scale);
  for (int step = 0; step < 5; ++step)
    optimizer->update(0, gradient_of_step(model.arena->size(), step), {step, o.lr, gradient_scale});
  for (std::size_t i = 0; i < expected.size(); ++i)
    CHECK(model.arena->weights()[i] == Approx(expected[i]).margin(2e-6));
  CHECK(optimizer->state().empty() == (o.momentum == 0));
}

TEST_CASE("SGD gives the same bits for any cut into slices and any number of threads") {
  OptimizerOptions o;
  o.momentum = 0.9, o.nesterov = true, o.weight_decay = 1e-3;
  Model whole(20000), sliced(20000);
  auto first = make_optimizer(o, *whole.arena), second = make_optimizer(o, *sliced.arena);
  const std::size_t size = whole.arena->size();
  const int threads = omp_get_max_threads();
  for (int step = 0; step < 3; ++step) {
    const auto gradient = gradient_of_step(size, step);
    omp_set_num_threads(1);
    first->update(0, gradient, {step, 0.1});
    omp_set_num_threads(3);
    const std::size_t cuts[] = {0, 3, 100001, size - 4, size};
    for (int cut = 3; cut >= 0; --cut)
      second->update(cuts[cut], std::span(gradient).subspan(cuts[cut], cuts[cut + 1] - cuts[cut]),
                     {step, 0.1});
  }
  omp_set_num_threads(threads);
  CHECK(std::memcmp(whole.arena->weights().data(), sliced.arena->weights().data(), size * sizeof(float)) ==
        0);
}

TEST_CASE("a bad status changes neither weights nor the optimizer's state on a CPU") {
  for (const char* name : {"sgd", "adamw"}) {
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
  OptimizerOptions o;
  std::string key;
  SECTION("name") {
    o.name = "sdg", key = "sgd";
  }
  SECTION("lr") {
    o.lr = 0, key = "optimizer.lr";
  }
  SECTION("lr is NaN") {
    o.lr = std::nan(""), key = "optimizer.lr";
  }
  SECTION("momentum") {
    o.momentum = 1, key = "optimizer.momentum";
  }
  SECTION("decay") {
    o.weight_decay = -1e-4, key = "optimizer.weight_decay";
  }
  SECTION("Nesterov alone") {
    o.nesterov = true, key = "optimizer.nesterov";
  }
  try {
    make_optimizer(o, *model.arena);
    FAIL("no error");
  } catch (const UserError& error) {
    INFO(error.what());
    CHECK(std::string(error.what()).find(key) != std::string::npos);
  }
}
