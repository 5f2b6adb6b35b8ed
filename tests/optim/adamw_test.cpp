// AdamW against its formula in float64.
#include <cmath>

#include "nn/core/rng.h"
#include "optim/optimizer.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/fill_normal.h"

using namespace topknot;

namespace {

struct TwoParameters {
  ParameterStore store;
  ParameterArena* arena;
  explicit TwoParameters(std::int64_t rows) {
    store.add("weight", {rows, 11}, fill_normal);
    store.add("bias", {11}, fill_normal);
    arena = &store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  }
};

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
      TwoParameters model(rows);
      ParameterArena& arena = *model.arena;
      OptimizerOptions options = adamw_options();
      options.decay_1d = decay_1d;
      options.beta1 = 0.8, options.beta2 = 0.99, options.epsilon = 1e-3;
      const auto optimizer = make_optimizer(options, arena);
      const auto weights = arena.weights();
      const std::size_t matrix = static_cast<std::size_t>(rows) * 11;
      std::vector<double> w(weights.begin(), weights.end()), m(w.size()), v(w.size());
      for (std::int64_t step = 0; step < 8; ++step) {
        const double lr = 0.05 / static_cast<double>(1 + step), scale = step == 3 ? 0.25 : 1;
        std::vector<float> gradient(w.size());
        fill_normal(gradient, CounterRng(2, RngUse::test, static_cast<std::uint32_t>(step)));
        const double t = static_cast<double>(step + 1);
        for (std::size_t i = 0; i < w.size(); ++i) {
          const double g = scale * gradient[i];
          if (i < matrix || decay_1d) w[i] -= lr * options.weight_decay * w[i];
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

TEST_CASE("options of adamw out of range are the user's errors, and only plain gradients are taken") {
  TwoParameters model(2);
  OptimizerOptions options = adamw_options();
  CHECK(make_optimizer(options, *model.arena)->takes(Applied::nothing));
  CHECK_FALSE(make_optimizer(options, *model.arena)->takes(Applied::momentum));
  CHECK_FALSE(make_optimizer(options, *model.arena)->takes(Applied::learning_rate));
  options.beta2 = 1;
  CHECK(user_error([&] { make_optimizer(options, *model.arena); }, {"optimizer.beta2", "[0, 1)"}));
  options.beta2 = 0.9;
  options.epsilon = 0;
  CHECK(user_error([&] { make_optimizer(options, *model.arena); }, {"optimizer.epsilon", "greater than 0"}));
}
