#pragma once
// Which elements of the arena weight decay is for.

#include <cstddef>
#include <vector>

#include "optim/optimizer.h"

namespace topknot {

struct SgdRange {
  std::size_t begin, end;
  bool decays;
};

// Ascending, covering the arena; neighbours differ in `decays`. 1-D parameters do not decay unless decay_1d.
std::vector<SgdRange> sgd_ranges(const OptimizerOptions& options, const ParameterArena& arena);

}  // namespace topknot
