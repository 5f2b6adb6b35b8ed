#pragma once
// Which layers travel together: three ways to find a merge plan from measured layer times and a cost model
// (dist/plan/schedule.h). Layers come, and plans are, in order of travel (output layer first): a plan says how
// many layers each group has. All three are deterministic; without layers the plan is empty, one layer is
// one group. Costs must be finite and not negative (Error).

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "dist/plan/schedule.h"

namespace topknot {

// One decision of merge_omgs. `layer` counts as the authors do, from the input: the layer that travels last
// is 0.
struct OmgsDecision {
  std::size_t layer = 0;
  double wait = 0, save = 0;  // seconds; merged when wait < save
  bool merged = false;
};
struct OmgsTrace {
  std::vector<OmgsDecision> decisions;
  double makespan = 0;  // by the algorithm's own bookkeeping; evaluate() gives the true one
};

// The greedy of Shi et al., INFOCOM 2020 (MGS-SGD, OMGS-SGD): merge a layer into the next one when the extra
// wait is shorter than the start-up that is saved. This follows the authors' released code, quirks and all,
// where it differs from the paper's claim of optimality:
// - the first two layers to travel are always merged, but the bookkeeping goes on as if the first were
//   selected and sent alone, so the code's own makespan is slightly off;
// - the wait is weighed against the next layer alone, never against the end of the pipeline, so the result
//   can be slower than no merging at all (its own fixture has such a case).
// `trace`, where given, gets the decisions in the order in which they were taken.
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
// beats in both, since starting earlier never ends later. A lower bound for the rest and the best plan known
// so far discard most of them.
//
// Exact up to rounding (1e-15 of the makespan a layer). Among equally fast plans it prefers no merging, then
// one group. A model can be built for which the fronts grow without end; they are then thinned, and `report`
// says how far from the best the plan can be at most. Takes time and memory in proportion to the square of
// the number of layers (8 bytes a pair).
std::vector<std::size_t> merge_optimal(std::span<const LayerCost> layers, const CostModel& model,
                                       OptimalReport* report = nullptr);

}  // namespace topknot
