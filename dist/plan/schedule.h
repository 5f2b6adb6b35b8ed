#pragma once
// The modelled time of one backward pass that sends its gradient in groups, and three searches for the groups
// that make it short. Pure arithmetic, no communication.
//
// The model is that of Shi et al., "Communication-efficient distributed deep learning with merged gradient
// sparsification on GPUs", INFOCOM 2020: a group is encoded on the compute thread once its last gradient is
// final, which delays the backward pass of the layers after it; the collectives run one after the other, in
// order, concurrently with the compute thread. It starts after its group's encoding and the one before.

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace topknot {

// Layers come in the order of sending: the order in which backward finishes them, so the output layer first.
struct LayerCost {
  double elements = 0;  // of its gradient, >= 0
  double backward = 0;  // seconds of its backward pass, >= 0
};

// Seconds of one group of so many elements, finite and >= 0; of a group of 0 elements, 0. A group is
// sparsified and sent as a whole, so these need not be additive.
struct CostModel {
  std::function<double(double elements)> sparsify, communicate;
};

// With no overlap: a collective takes the compute thread's time.
CostModel without_overlap(const CostModel& model);

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

// `groups`: layers per group in order of sending, each at least 1; together all layers. Throws Error for
// anything else, and for costs that are negative or not finite.
Timeline evaluate(std::span<const LayerCost> layers, std::span<const std::size_t> groups,
                  const CostModel& model);

// The searches. A plan says how many layers each group has, in order of sending; without layers it is empty.
// All are deterministic. Costs must be finite and not negative (Error).

// One decision of merge_omgs. `layer` counts from the input, as the authors': the one sent last is 0.
struct OmgsDecision {
  std::size_t layer = 0;
  double wait = 0, save = 0;  // seconds; merged when wait < save
  bool merged = false;
};
struct OmgsTrace {
  std::vector<OmgsDecision> decisions;
  double makespan = 0;  // by the algorithm's own bookkeeping; evaluate() gives the true one
};

// OMGS, the greedy rule of Shi et al., INFOCOM 2020 (MGS-SGD, OMGS-SGD): merges a layer into the next one
// when the extra wait is shorter than the start-up that is saved. Follows the authors' released code, which
// is not optimal as the paper claims:
// - the first two layers to be sent are always merged, but the bookkeeping goes on as if the first were
//   selected and sent alone, so the code's own makespan is slightly off;
// - the wait is weighed against the next layer alone, never against the end of the pipeline, so the result
//   can be slower than no merging at all (its own fixture has such a case).
// `trace`, if given, receives the decisions in the order in which they were made.
std::vector<std::size_t> merge_omgs(std::span<const LayerCost> layers, const CostModel& model,
                                    OmgsTrace* trace = nullptr);

// MG-WFBP (Shi, Chu, Li, INFOCOM 2019; TPDS 2021), for dense gradients: a layer waits for the next one when
// that one is ready before this one's message would have ended and either the network is busy until then or
// the wait is below the start-up `alpha` (seconds). Follows the authors' newer code in deciding about every
// layer but the last; its fixed rule for layers below 8192 elements is left out.
std::vector<std::size_t> merge_mgwfbp(std::span<const LayerCost> layers, double alpha,
                                      const std::function<double(double elements)>& communicate);

struct OptimalReport {
  double excess = 0;      // seconds by which the plan may be slower than the best one; 0: it is the best one
  std::size_t front = 0;  // widest front of the search
};

// The best plan by evaluate(), ours: a dynamic programme over the cut positions. Of all plans for the layers
// before a cut only (compute free, network free) matters, and of those pairs only the ones that no other
// beats in both, since starting earlier never ends later. A lower bound for the rest discards most of them.
//
// Exact up to rounding (1e-15 of the makespan per layer). Among equally fast plans it prefers no merging,
// then one group. For contrived models the fronts grow without limit; they are then thinned, and `report` has
// the greatest possible distance from the best plan. Takes time and memory in proportion to the square of the
// number of layers (8 bytes per pair).
std::vector<std::size_t> merge_optimal(std::span<const LayerCost> layers, const CostModel& model,
                                       OptimalReport* report = nullptr);

}  // namespace topknot
