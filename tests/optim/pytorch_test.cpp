// Update rules against weights that PyTorch 2.15 computed: torch.optim.SGD and AdamW over six steps of one parameter [1, 5],
// w_i = (i - 2) / 2 at first, gradient sin(1 + i + 3 t) (i + 1), learning rate 0.1 / (1 + t), weight decay 0.1.
#include <cmath>

#include "optim/optimizer.h"
#include "tests/support/catch.h"

using namespace topknot;

namespace {

std::vector<float> after_six_steps(const OptimizerOptions& options) {
  ParameterStore store;
  store.add("weight", {1, 5}, [](std::span<float> values, const CounterRng&) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = (static_cast<float>(i) - 2) / 2;
  });
  ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
  const auto optimizer = make_optimizer(options, arena);
  for (int t = 0; t < 6; ++t) {
    std::vector<float> gradient;
    for (int i = 0; i < 5; ++i) gradient.push_back(static_cast<float>(std::sin(1 + i + 3 * t) * (i + 1)));
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
