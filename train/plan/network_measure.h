#pragma once
// The network between the ranks, timed by the collectives that a run uses.

#include <cstddef>
#include <span>

#include "dist/comm/collective_queue.h"
#include "train/plan/exchange_profile.h"

namespace topknot {

struct NetworkTimes {
  Link link;
  ExchangeProfile::Fit gather, reduce;
};

// Collective. Messages from 64 bytes up to `gather_bytes` and `reduce_bytes`, about 0.4 s for each of the
// two; a network that is slower than that is measured with small messages only. `order`: of the all-reduce.
// Only rank 0's result counts. One rank: all zero.
NetworkTimes measure_network(CollectiveQueue& queue, std::size_t gather_bytes, std::size_t reduce_bytes,
                             SumOrder order);

// The line of least squared errors, each divided by its time, with no negative alpha or beta. Sizes span
// several decades: in plain least squares the largest alone would count, with relative errors the short
// messages, which buffers on the way make look fast, would bend the line. Needs as many sizes as seconds, at
// least one, all seconds above 0 (Error).
LinearFit fit_network(std::span<const double> bytes, std::span<const double> seconds);

}  // namespace topknot
