#pragma once
// compress.layer_density: a density of its own for each tensor, from a file or from measured times
// (LAGS-SGD). It holds where it exceeds the step's density.

#include <map>
#include <string>

#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "nn/core/parameter.h"
#include "train/config/config.h"
#include "train/run_directory.h"
#include "train/setup.h"

namespace topknot {

using LayerDensity = std::map<std::string, double>;  // by parameter name

// A JSON object {"parameter": density}, densities in (0, 1]; parameters that it does not name keep the step's
// density, those that travel dense may be named and stay dense. Throws UserError, with the path: a file that
// cannot be read or is no such object, names that the model does not have, densities out of range.
LayerDensity read_layer_density(const std::string& path, const ParameterArena& arena);
std::string layer_density_json(const LayerDensity& densities);

// From times measured now: the median over a few backward passes of a model of its own, made for this and
// thrown away, so that nothing of the run changes. By train/plan/lags.h, for `ranks` ranks.
LayerDensity measure_layer_density(const Config& config, const Dataset& data, int ranks);

// What the configuration asks for, the same on every rank. Collective. `auto` is measured on rank 0 while the
// others wait, and written to layer_density.json in the run directory, which another run may take as its file:
// the same bits in every run hold for given densities. Throws UserError as read_layer_density(), and where
// the ranks' files differ.
LayerDensity layer_density(const Config& config, const Dataset& data, const ParameterArena& arena,
                           CollectiveQueue& queue, const Communicator& communicator,
                           const RunDirectory& folder);

}  // namespace topknot
