#pragma once
// The merge planner's fixture: 14 layers, and the cost models of the OMGS authors for 1 Gbit/s Ethernet.
// Golden values computed from it: float64.

#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "dist/plan/schedule.h"

namespace topknot::testing {

// The tables count layers from the input; are sent starts at the output.
inline std::vector<LayerCost> merge_layers() {
  const double sizes[] = {1728,    36864,   73728,   147456,  294912,  589824,  589824,
                          1179648, 2359296, 2359296, 2359296, 2359296, 2359296, 5120};
  const double backward[] = {.004,  .006, .003, .004,  .002,  .003,  .003,
                             .0015, .002, .002, .0006, .0006, .0006, .0002};
  std::vector<LayerCost> layers;
  for (int l = 13; l >= 0; --l) layers.push_back({sizes[l], backward[l]});
  return layers;
}

// Top-k at density 0.001, gathered by `ranks` ranks.
inline CostModel merge_model(int ranks) {
  const std::map<int, std::pair<double, double>> ethernet = {
      {2, {1.6e-3, 1.0e-8}}, {4, {2.7e-3, 1.3e-8}}, {8, {4.0e-3, 1.5e-8}}, {16, {1.1e-2, 1.7e-8}}};
  const auto [alpha, beta] = ethernet.at(ranks);
  CostModel model;
  model.sparsify = [](double x) { return x > 0 ? 2.18896957e-10 * x * std::log2(x) : 0; };
  model.communicate = [alpha = alpha, beta = beta, ranks](double x) {
    return x > 0 ? 2 * (alpha + beta * 4 * ranks * 0.001 * x) : 0;
  };
  return model;
}

using Sizes = std::vector<std::size_t>;

inline Sizes no_merge(std::size_t layers) {
  return Sizes(layers, 1);
}

}  // namespace topknot::testing
