#pragma once
// Measures an ExchangeProfile when a run starts: layers, encoding and network.

#include <cstddef>
#include <span>

#include "dist/comm/collective_queue.h"
#include "dist/exchange/exchange.h"
#include "train/plan/exchange_profile.h"
#include "train/setup.h"

namespace topknot {

// Collective; the same on every rank. Takes about a second beside a few training steps of a model of its
// own, so that nothing of the run changes:
// - backward, forward and update times as measure_layer_times() (train/plan/layer_density.h), all ranks at once; with
//   clipping over the whole model all parameters are ready when the backward pass is over;
// - encoding and decoding of the real compressor, on normally distributed gradients, for about five groups of
//   neighbouring parameters from the smallest parameter to all of them, at compress.density;
// - all_gather and all_reduce from 64 bytes to the size of the largest message, fewer sizes where a network
//   is slow, and fits as fit_network();
// - the link: alpha is half a round trip of 8 bytes between ranks 0 and 1, beta a gathered byte of the largest
//   messages (up to 1 MiB at least) divided by P-1, the overhead what is left of the gather's alpha for each further rank.
// `options`: of the run's exchange; its merge, plan and collective are not looked at.
ExchangeProfile measure_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                                 CollectiveQueue& queue, const ExchangeOptions& options);

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
