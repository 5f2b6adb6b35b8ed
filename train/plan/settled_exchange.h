#pragma once
// The exchange's options with what only a run can measure: layer densities, merge plans, the collective.

#include <optional>

#include "dist/comm/collective_queue.h"
#include "dist/exchange/exchange.h"
#include "train/plan/exchange_measure.h"
#include "train/trainer.h"

namespace topknot {

struct SettledExchange {
  ExchangeOptions options;
  ExchangeChoice choice;

  // By the run's profile, in seconds; 0 where there is none.
  double modelled_makespan(const std::vector<Group>& groups) const;
};

// Collective. What was measured stands in the run directory, and in its config.yaml.
SettledExchange settle_exchange(const RunInputs& inputs, ParameterArena& arena, CollectiveQueue& queue,
                                const Communicator& communicator);

}  // namespace topknot
