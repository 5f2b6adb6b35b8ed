#pragma once
// Times of collectives of several sizes, measured when a run starts (train/plan/exchange_profile.h).

#include <cstddef>
#include <span>
#include <vector>

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
// Collective. On rank 0 the least of a few times of an all_gather of `bytes`: waiting for each other makes some of them
// longer, a slower link all of them.
double least_gather_seconds(CollectiveQueue& queue, std::size_t bytes);
// Does what measure_network() does for coded sums (dist/sparse/coded_sum.h) of up to `bytes` of normally
// distributed floats, or bfloat16. The fit is over the bytes before coding and includes the coder's time.
ExchangeProfile::Fit measure_coded_sum(CollectiveQueue& queue, std::size_t bytes, bool bfloat16);
// The line of least squared errors, each divided by its time, with no negative alpha or beta. Sizes span
// several decades: in plain least squares the largest alone would count, with relative errors the short
// messages, which buffers on the way make look fast, would bend the line. Needs as many sizes as seconds, at
// least one, all seconds above 0 (Error).
LinearFit fit_network(std::span<const double> bytes, std::span<const double> seconds);

// Normally distributed values; each round starts at another offset, so that no two rounds in a row are equal.
// Longer vectors repeat them at slightly different scales, so that there are no ties.
class Noise {
 public:
  explicit Noise(std::size_t size);
  void fill(std::span<float> to, int round) const;

 private:
  std::vector<float> values_;
};

}  // namespace topknot
