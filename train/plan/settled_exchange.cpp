#include "train/plan/settled_exchange.h"

#include "train/plan/exchange_plan.h"
#include "train/plan/layer_density.h"

namespace topknot {

double SettledExchange::modelled_makespan(const std::vector<Group>& groups) const {
  if (!choice.profile) return 0;
  std::vector<std::size_t> parameters;
  for (const Group& group : groups) parameters.push_back(group.parameters.size());
  return topknot::modelled_makespan(*choice.profile, parameters);
}

SettledExchange settle_exchange(const RunInputs& inputs, ParameterArena& arena, CollectiveQueue& queue,
                                const Communicator& communicator) {
  const Config& config = inputs.config;
  SettledExchange settled{exchange_options(config), {}};
  ExchangeOptions& options = settled.options;
  options.layer_density =
      layer_density(config, *inputs.data.train, arena, queue, communicator, inputs.folder);
  settled.choice = choose_exchange(config, *inputs.data.train, arena, queue, inputs.folder, options);
  if (communicator.rank() != 0 || !(settled.choice.planned || settled.choice.chosen)) return settled;
  Config effective = config;
  auto origins = inputs.origins;
  effective.exchange.groups.assign(options.groups.begin(), options.groups.end());
  effective.exchange.collective = options.collective;
  if (settled.choice.planned) origins["exchange.groups"] = Origin::measured;
  if (settled.choice.chosen) origins["exchange.collective"] = Origin::measured;
  rewrite_config(inputs.folder, effective, origins);
  return settled;
}

}  // namespace topknot
