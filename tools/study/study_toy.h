#pragma once
// The toy problem of RegTop-k's authors (Toy_Example.py of github.com/AlBerey/RegTopK): logistic regression
// of two workers with one point each, (100, 1) and (-100, 1), both labelled 1, one of two entries sent a
// step. The first entries cancel; Top-k sends nothing else for 99 steps. Step 99 is a tie in exact
// arithmetic, so rounding decides it.

#include <array>
#include <cstdint>
#include <vector>

#include "compress/compressor.h"

namespace topknot {

struct ToyTrace {
  // [t]: after t steps, 0 to `iterations`.
  std::vector<double> loss;  // mean over both points
  std::vector<std::array<double, 2>> weights;
  // [t]: what worker 0 and worker 1 sent in step t; empty where the method is dense.
  std::vector<std::array<std::uint32_t, 2>> sent;
};
// From w = (0, 1) at learning rate 0.9 and density 0.5. options.name: dense, or a method that sends exactly
// one entry.
ToyTrace toy_trace(const CompressOptions& options, int iterations);

}  // namespace topknot
