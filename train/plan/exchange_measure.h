#pragma once
// Measures an ExchangeProfile when a run starts, where something of it is needed, and settles what depends on
// it: the merge plan and the collective.

#include <optional>

#include "dist/comm/collective_queue.h"
#include "dist/exchange/exchange.h"
#include "train/plan/exchange_profile.h"
#include "train/run_directory.h"
#include "train/setup.h"

namespace topknot {

// Collective; the same on every rank. Takes about a second beside a few training steps of a model of its
// own, so that nothing of the run changes:
// - backward, forward and update times as measure_layer_times() (train/plan/layer_times.h), all ranks at once; with
//   clipping over the whole model all parameters are ready when the backward pass is over;
// - encoding and decoding of the real compressor, on normally distributed gradients, for about five groups of
//   neighbouring parameters from the smallest parameter to all of them, at compress.density;
// - all_gather and all_reduce from 64 bytes to the size of the largest message, fewer sizes where a network
//   is slow, and fits as fit_network() (train/plan/network_measure.h);
// - the link: alpha is half a round trip of 8 bytes between ranks 0 and 1, beta a gathered byte of the largest
//   messages (up to 1 MiB at least) divided by P-1, the overhead what is left of the gather's alpha for each further rank.
// `options`: of the run's exchange; its merge, plan and collective are not looked at.
ExchangeProfile measure_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                                 CollectiveQueue& queue, const ExchangeOptions& options);

// What the start of a run made of its configuration.
struct ExchangeChoice {
  std::optional<ExchangeProfile>
      profile;           // measured, or of exchange.profile; none where neither was asked for
  bool planned = false;  // options.groups was planned here
  bool chosen = false;   // options.collective was chosen here
};

// Collective; call it before the Exchange is made. Measures where exchange.merge needs a plan and has none, or
// exchange.collective is auto, unless exchange.profile names a file, which rank 0 reads. Fills in
// options.groups and options.collective, the same on every rank; rank 0 writes what was measured to
// exchange_profile.json in the run directory and tells the plan. Throws UserError as read_exchange_profile() and
// check_exchange_profile() do.
ExchangeChoice choose_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                               CollectiveQueue& queue, const RunDirectory& folder, ExchangeOptions& options);

}  // namespace topknot
