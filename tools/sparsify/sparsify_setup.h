#pragma once
// The options of `sparsify` as the compressors take them.

#include <cstddef>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "nn/core/step.h"
#include "tools/sparsify/sparsify.h"

namespace topknot {

struct SparsifySetup {
  CompressOptions compress;
  GroupSpec group;
  double density = 1, lr = 1;
  double clip = 0;              // greatest norm of a rank's gradient; 0: off
  std::vector<double> weights;  // by rank, mean 1
  bool momentum_given = false, lr_given = false;
  std::vector<std::string> notes;  // settings without effect
};

// For steps of `ranks` ranks and `numel` elements. Throws UserError: unknown keys and names with a
// suggestion, values out of range, keys without meaning here, sizes and weights that do not fit.
SparsifySetup sparsify_setup(const SparsifyOptions& options, std::size_t ranks, std::size_t numel);

// "64x27,64,10x64x3x3": [rows, the other dimensions] each, one vector where there is one number. Throws
// UserError where the sizes do not add up to numel.
std::vector<TensorSpec> parse_tensors(const std::string& text, std::size_t numel);

}  // namespace topknot
