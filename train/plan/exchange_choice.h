#pragma once
// The exchange's options with what only a run can measure: layer densities, merge plans, the collective.

#include <optional>

#include "dist/comm/collective_queue.h"
#include "dist/exchange/exchange.h"
#include "train/plan/exchange_profile.h"
#include "train/run_directory.h"
#include "train/trainer.h"

namespace topknot {

// What was measured and chosen at the start of a run.
struct ExchangeChoice {
  std::optional<ExchangeProfile>
      profile;           // measured, or of exchange.profile; none where neither was asked for
  bool planned = false;  // options.groups was planned here
  bool chosen = false;   // options.collective was chosen here
};

// Collective; call it before the Exchange is made. Measures where exchange.merge needs a plan and has none, or
// exchange.collective is auto, unless exchange.profile names a file, which rank 0 reads. Fills in
// options.groups and options.collective, the same on every rank; rank 0 writes what was measured to
// exchange_profile.json in the run directory and logs the plan. Throws UserError as read_exchange_profile() and
// check_exchange_profile() do.
ExchangeChoice choose_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                               CollectiveQueue& queue, const RunDirectory& folder, ExchangeOptions& options);

struct ResolvedExchange {
  ExchangeOptions options;
  ExchangeChoice choice;

  // The configuration with the groups and the collective that were planned or chosen.
  Config effective(Config config) const;
  // By the run's profile, in seconds; 0 where there is none.
  double modelled_makespan(const std::vector<Group>& groups) const;
};

// Collective. Rank 0 writes what was measured to the run directory, and to its config.yaml.
ResolvedExchange settle_exchange(const RunInputs& inputs, ParameterArena& arena, CollectiveQueue& queue,
                                 const Communicator& communicator);

}  // namespace topknot
