#pragma once
// How long the parts of a step take on this machine: what layer densities (train/plan/layer_density.h) and merge
// plans (train/plan/exchange_measure.h) are made from.

#include <functional>
#include <vector>

#include "train/setup.h"

namespace topknot {

// Seconds of the wall clock, medians over a few steps after warm-up.
struct LayerTimes {
  // By parameter in arena order: from the parameter that backward finished before it; 0 for one that the loss
  // does not reach.
  std::vector<double> backward;
  // The same, summed in the order in which backward finishes them: from the start of the backward pass.
  std::vector<double> ready;
  double data_s = 0, forward_s = 0;  // of one batch; no thread prepares it ahead
  double update_s = 0;               // of all weights
};

// Of a model of its own with this rank's data and as many threads as are set, made for this and thrown away,
// so that nothing of the run changes. `before_pass`, where given, runs before each pass: a barrier, so that
// ranks that share a machine are measured together. All ranks make the same number of passes.
LayerTimes measure_layer_times(const Config& config, const Dataset& data, int rank, int ranks,
                               const std::function<void()>& before_pass = {});

}  // namespace topknot
