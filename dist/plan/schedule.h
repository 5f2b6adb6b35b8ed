#pragma once
// The time of one backward pass that sends its gradient in groups, from a cost model: what a merge plan is
// judged by. Pure arithmetic, no communication.
//
// The model is that of Shi et al., "Communication-efficient distributed deep learning with merged gradient
// sparsification on GPUs", INFOCOM 2020: a group is encoded on the compute thread once its last gradient is
// final, which delays the backward pass of the layers after it; the collectives run one after the other, in
// order, beside the compute thread. A group's collective starts when the group is encoded and the one before
// it has ended.

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace topknot {

// Layers come in the order of travel: the order in which backward finishes them, so the output layer first.
struct LayerCost {
  double elements = 0;  // of its gradient, >= 0
  double backward = 0;  // seconds of its backward pass, >= 0
};

// Seconds of one group of so many elements, finite and >= 0; of a group of 0 elements, 0. A group is
// sparsified and sent as a whole, so these need not be additive.
struct CostModel {
  std::function<double(double elements)> sparsify, communicate;
};

// Seconds since backward began.
struct GroupTime {
  double ready = 0;    // the group's last gradient is final
  double encoded = 0;  // sparsified
  double begin = 0;    // its collective begins
  double end = 0;      // and ends
};

struct Timeline {
  std::vector<GroupTime> groups;
  double makespan = 0;  // end of the last collective; 0 without layers
};

// `groups`: layers per group in order of travel, each at least 1; together all layers. Throws Error for
// anything else, and for costs that are negative or not finite.
Timeline evaluate(std::span<const LayerCost> layers, std::span<const std::size_t> groups,
                  const CostModel& model);

}  // namespace topknot
