#include "optim/optimizer.h"

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "nn/core/base/check.h"
#include "nn/core/base/text.h"

namespace topknot {
namespace {

void require(bool condition, const std::string& key, const std::string& rule, double value) {
  if (!condition)
    throw UserError(fmt::format("optimizer.{} must be {}, not {}", key, rule, short_text(value)));
}

}  // namespace

Registry<OptimizerFactory>& optimizers() {
  static Registry<OptimizerFactory> registry("optimizer");
  return registry;
}

std::vector<DecayRange> decay_ranges(const OptimizerOptions& options, const ParameterArena& arena) {
  std::vector<DecayRange> ranges;
  for (const Parameter* parameter : arena.parameters()) {
    const bool decays = options.weight_decay > 0 && (options.decay_1d || parameter->shape().rank() > 1);
    const std::size_t end = parameter->offset() + parameter->numel();
    if (!ranges.empty() && ranges.back().decays == decays)
      ranges.back().end = end;
    else
      ranges.push_back({parameter->offset(), end, decays});
  }
  return ranges;
}

void check_optimizer(const OptimizerOptions& options) {
  optimizers().find(options.name);
  require(std::isfinite(options.lr) && options.lr > 0, "lr", "greater than 0", options.lr);
  require(options.momentum >= 0 && options.momentum < 1, "momentum", "in [0, 1)", options.momentum);
  require(std::isfinite(options.weight_decay) && options.weight_decay >= 0, "weight_decay", "0 or greater",
          options.weight_decay);
  for (const auto& [key, beta] : {std::pair{"beta1", options.beta1}, std::pair{"beta2", options.beta2}})
    require(beta >= 0 && beta < 1, key, "in [0, 1)", beta);
  require(std::isfinite(options.epsilon) && options.epsilon > 0, "epsilon", "greater than 0",
          options.epsilon);
  if (options.nesterov && options.momentum == 0)
    throw UserError(
        "optimizer.nesterov needs momentum: set optimizer.momentum above 0, or optimizer.nesterov to false");
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, ParameterArena& arena) {
  check_optimizer(options);
  return optimizers().find(options.name)(options, arena);
}

}  // namespace topknot
