#pragma once
// compress.layer_density: one density per tensor, from a file or from measured times (LAGS-SGD). It counts if
// it exceeds the step's density.

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "nn/core/parameter.h"
#include "train/config/config.h"
#include "train/run_directory.h"
#include "train/setup.h"

namespace topknot {

using LayerDensity = std::map<std::string, double>;  // by parameter name

// A JSON object {"parameter": density}, densities in (0, 1]; parameters that it does not name keep the step's
// density, those that are sent dense may be named and stay dense. Throws UserError, with the path: a file
// that cannot be read or is no such object, names that the model does not have, densities out of range.
LayerDensity read_layer_density(const std::string& path, const ParameterArena& arena);
std::string layer_density_json(const LayerDensity& densities);

// Shi et al., "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence
// Guarantees", ECAI 2020, arXiv 1911.08727: a layer may send as much as is sent while it is computed. The
// densities of the layers, as in the authors' code (predict_density_with_size_and_computation; there it is
// switched off by an early return):
//
//   t = t_comp - log2(P) * alpha                           time left once the messages have begun
//   rho = base if t <= 0, else t / (2 (P - 1) beta m)   a position and a value from each other rank
//   rho = 0.05 if rho > 1
//   rho = max(rho, base)
//
// `times`: seconds of each layer's backward pass, t_comp; `sizes`: elements, m; alpha: seconds that a message
// takes to begin with; beta: seconds that an element (4 bytes) takes, above 0; `base`: the least density, in
// (0, 1], 0.001 in their code. The result is in (0, 1]. Throws Error if the lists differ in length or a
// number is out of range.
//
// Properties: a layer whose whole gradient would be sent in time (rho > 1) gets 0.05, less than a layer for
// which it is just not so (rho = 0.9). t_comp is the layer's own time, though its message is sent during the
// layers that come after it; the paper bounds the communication of layer l by the computation of layer l - 1.
// The time of selecting is left out. With one rank the formula divides by zero; nothing is sent then, and
// every layer gets `base`.
std::vector<double> lags_densities(const std::vector<double>& times, const std::vector<std::size_t>& sizes,
                                   double alpha, double beta, int ranks, double base);

// How long the parts of a step take on this machine: what layer densities and merge plans
// (train/plan/exchange_profile.h) are made from. Seconds of the wall clock, medians over a few steps after
// warm-up.
struct LayerTimes {
  // Seconds since the parameter that backward finished before, in arena order; 0 if the loss does not reach
  // it.
  std::vector<double> backward;
  // The same, summed in the order in which backward finishes them: from the start of the backward pass.
  std::vector<double> ready;
  double data_s = 0, forward_s = 0;  // of one batch; no thread prepares it ahead
  double update_s = 0;               // of all weights
};

// Measures a model of its own with this rank's data and as many threads as are set, made for this and thrown
// away, so that nothing of the run changes. `before_pass`, if given, runs before each pass: a barrier, so
// that ranks that share a machine are measured together. All ranks make the same number of passes.
LayerTimes measure_layer_times(const Config& config, const Dataset& data, int rank, int ranks,
                               const std::function<void()>& before_pass = {});

// From times measured now: the median over a few backward passes of a model of its own, made for this and
// thrown away, so that nothing of the run changes. By lags_densities(), for `ranks` ranks.
LayerDensity measure_layer_density(const Config& config, const Dataset& data, int ranks);

// The densities that the configuration asks for, the same on every rank. Collective. `auto` is measured on
// rank 0 while the others wait, and written to layer_density.json in the run directory, which another run may
// take as its file: the same bits in every run hold for given densities. Throws UserError as
// read_layer_density(), and where the ranks' files differ.
LayerDensity layer_density(const Config& config, const Dataset& data, const ParameterArena& arena,
                           CollectiveQueue& queue, const Communicator& communicator,
                           const RunDirectory& folder);

}  // namespace topknot
