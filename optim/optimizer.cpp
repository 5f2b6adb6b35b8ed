#include "optim/optimizer.h"

#include <fmt/format.h>

#include <cmath>

#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

void require(bool condition, const std::string& key, const std::string& rule, double value) {
  if (!condition)
    throw UserError(fmt::format("optimizer.{} must be {}, not {}", key, rule, short_text(value)));
}

}  // namespace

Registry<OptimizerType>& optimizers() {
  static Registry<OptimizerType> registry("optimizer");
  return registry;
}

ArenaSlices::ArenaSlices(const OptimizerOptions& options, ParameterArena& arena) : arena_(arena) {
  std::vector<std::uint64_t> boundaries;
  bool decays = false;
  for (const Parameter* parameter : arena.parameters()) {
    const bool now = options.weight_decay > 0 && (options.decay_1d || parameter->shape().rank() > 1);
    if (parameter->offset() == 0)
      first_decays_ = now;
    else if (now != decays)
      boundaries.push_back(parameter->offset());
    decays = now;
  }
  boundary_count_ = static_cast<std::uint32_t>(boundaries.size());
  if (boundaries.empty()) return;
  const std::size_t floats = boundaries.size() * sizeof(std::uint64_t) / sizeof(float);
  boundaries_ = Tensor::empty({static_cast<std::int64_t>(floats)}, Layout::plain, arena.device());
  backend(arena.device())
      .to_device(boundaries_.data(), reinterpret_cast<const float*>(boundaries.data()), floats);
}

ArenaSlice ArenaSlices::slice(std::size_t offset, std::span<const float> gradient) const {
  TOPKNOT_CHECK(offset + gradient.size() <= arena_.size(), "a slice outside the arena");
  return {offset,
          gradient.size(),
          arena_.weights().data() + offset,
          gradient.data(),
          reinterpret_cast<const std::uint64_t*>(boundaries_.data()),
          boundary_count_,
          first_decays_};
}

Tensor zeros_like(const ParameterArena& arena) {
  return Tensor::zeros({static_cast<std::int64_t>(arena.size())}, Layout::plain, arena.device());
}

void check_optimizer(const OptimizerOptions& options) {
  require(std::isfinite(options.lr) && options.lr > 0, "lr", "greater than 0", options.lr);
  require(options.momentum >= 0 && options.momentum < 1, "momentum", "in [0, 1)", options.momentum);
  require(std::isfinite(options.weight_decay) && options.weight_decay >= 0, "weight_decay", "0 or greater",
          options.weight_decay);
  if (options.nesterov && options.momentum == 0)
    throw UserError("optimizer.nesterov: needs optimizer.momentum above 0");
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, ParameterArena& arena) {
  const OptimizerType& type = optimizers().find(options.name);
  check_optimizer(options);
  if (const DeviceKind kind = arena.device().kind; !type.computes_on(kind)) {
    std::string others;
    for (const std::string& name : optimizers().names())
      if (optimizers().find(name).computes_on(kind)) others += name + ", ";
    throw UserError(fmt::format("optimizer.name: '{}' has no kernels for a GPU; give {}or train.device=cpu",
                                options.name, others));
  }
  return type.make(options, arena);
}

}  // namespace topknot
