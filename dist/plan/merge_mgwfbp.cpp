#include <algorithm>

#include "dist/plan/merge_plan.h"

namespace topknot {

std::vector<std::size_t> merge_mgwfbp(std::span<const LayerCost> layers, double alpha,
                                      const std::function<double(double elements)>& communicate) {
  const std::size_t count = layers.size();
  std::vector<std::size_t> groups;
  double backward_end = count ? layers[0].backward : 0;
  double free = 0;          // when the network has sent the groups before this one
  double elements = 0;      // of this group
  std::size_t waiting = 0;  // layers of this group
  for (std::size_t i = 0; i < count; ++i) {
    elements += layers[i].elements;
    ++waiting;
    const double begin = std::max(free, backward_end), end = begin + communicate(elements);
    if (i + 1 < count) {
      const double ready = backward_end += layers[i + 1].backward;
      if (ready < end && (begin > ready || ready - begin < alpha)) continue;
    }
    groups.push_back(waiting);
    free = end;
    elements = 0;
    waiting = 0;
  }
  return groups;
}

namespace {

const bool merge_mgwfbp_registered =
    (merge_rules().add("mgwfbp", "planned from measured times by the greedy of MG-WFBP",
                       {.plan =
                            [](std::span<const LayerCost> layers, const MergeCosts& costs) {
                              return merge_mgwfbp(layers, costs.startup, costs.model.communicate);
                            }}),
     true);

}  // namespace

}  // namespace topknot
