#include "train/local_steps.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

namespace topknot {
namespace {

// The same parameters in the same order, for sizes and places; what they hold is the caller's.
ParameterArena& lay_out_as(const ParameterStore& model, ParameterStore& store) {
  std::map<std::string, const Parameter*> by_name;
  for (const auto& parameter : model.parameters()) {
    by_name[parameter->name()] = parameter.get();
    store.add(parameter->name(), parameter->shape(), [](std::span<float>, const CounterRng&) {});
  }
  return store.build([&](const Parameter& p) { return by_name.at(p.name())->compressible(); }, 0,
                     [&](const Parameter& p) { return !by_name.at(p.name())->trained(); });
}

}  // namespace

OptimizerOptions outer_options(const Config::Outer& outer) {
  OptimizerOptions options;
  options.name = "sgd";
  options.lr = outer.lr;
  options.momentum = outer.momentum;
  options.nesterov = outer.name == "nesterov" && outer.momentum > 0;
  return options;
}

LocalSteps::LocalSteps(const Config& config, ParameterStore& model, int rank)
    : rank_(rank),
      every_(config.exchange.every),
      outer_lr_(config.outer.lr),
      clip_norm_(config.train.clip_global),
      model_(model.arena()),
      arena_(lay_out_as(model, outer_)),
      backend_(backend(model_.device())),
      inner_(make_optimizer(config.optimizer, model_)),
      outer_optimizer_(make_optimizer(outer_options(config.outer), arena_)),
      clip_(model_.device(), model_.size()) {
  backend_.copy(model_.all_weights().data(), arena_.all_weights().data(), arena_.all_weights().size());
}

bool LocalSteps::inner_step(const StepContext& context, float loss) {
  const std::span<float> gradient = model_.gradient(0, model_.size());
  clip_.sum_of_squares(gradient, false);
  if (!std::isfinite(loss) || !std::isfinite(*clip_.sum())) return false;
  StepParameters step{.step = context.step, .lr = context.lr, .rank = rank_};
  if (clip_norm_ > 0) clip_.set_gradient_scale(clip_norm_, &step);
  inner_->update(0, gradient, step);
  return true;
}

StepReport LocalSteps::sync(Exchange& exchange, const StepContext& context) {
  StepContext round = context;
  round.lr = outer_lr_;
  exchange.begin_step(round);
  bool add = false;
  for (const Parameter* parameter : arena_.parameters()) {
    const std::span<float> delta(parameter->gradient(), parameter->numel());
    backend_.copy(parameter->value(), delta.data(), delta.size());
    backend_.add_scaled(delta.data(), model_.weights().data() + parameter->offset(), delta.size(), -1.0f);
    clip_.sum_of_squares(delta, std::exchange(add, true));
  }
  for (Parameter* parameter : arena_.parameters()) exchange.ready(*parameter);
  // In place of a loss, for the ranks' agreement: a dense sum would not tell whose Delta is not finite.
  const float found = static_cast<float>(*clip_.sum() - *clip_.sum());
  exchange.end_backward(&found);
  exchange.communicate();
  exchange.decode_and_commit();
  if (exchange.committed())
    for (const Group& group : exchange.groups())
      outer_optimizer_->update(group.begin, exchange.averaged(group), exchange.step_state(),
                               exchange.applied(group));
  backend_.copy(arena_.weights().data(), model_.weights().data(), arena_.size());
  return exchange.end_step();
}

void LocalSteps::swap_weights() {
  const std::span<float> mine = model_.weights(), theta = arena_.weights();
  std::swap_ranges(mine.begin(), mine.end(), theta.begin());
}

std::vector<std::span<float>> LocalSteps::inner_state() {
  std::vector<std::span<float>> state = inner_->state();
  state.insert(state.begin(), model_.weights());
  return state;
}

}  // namespace topknot
