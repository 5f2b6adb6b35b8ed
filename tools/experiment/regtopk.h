#pragma once
// The two small problems of RegTop-k's authors, on ranks in one thread.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "compress/compressor.h"

namespace topknot {

// The linear regression of RegTop-k's authors (arXiv 2409.14893 and 2501.05633; set-up as in their
// LinearRegression.py and SynthDataSet.py): workers whose data have different optima, full-batch SGD on the
// mean squared error, and how far the shared weights end from the shared optimum.
//
// Worker n has rows A_n ~ N(0, 1), its own solution t_n = m_n + N(0, 1) with m_n ~ N(0, 5), and observations
// A_n t_n + N(0, 0.5) (variances). The weights start at U(-1, 1) / sqrt(J). Their guard that rejects long
// steps is left out: it is no part of the method.
struct RegressionProblem {
  int ranks = 20;
  std::size_t dims = 100, rows = 500;  // J, and rows a worker
  // By rank, such that the gradient is matrix w - rhs: (2 / rows) A^T A, dims x dims, and (2 / rows) A^T y.
  std::vector<std::vector<double>> matrix, rhs;
  std::vector<double> start, optimum;  // dims
};
RegressionProblem make_regression(std::uint64_t seed);

// log10 |w - optimum|^2 after so many steps at learning rate 0.01, the arithmetic in float. Not finite where
// the weights are not.
double regression_distance(const RegressionProblem& problem, const CompressOptions& options, double density,
                           int iterations);

// The toy problem of RegTop-k's authors (Toy_Example.py of github.com/AlBerey/RegTopK): logistic regression
// of two workers with one point each, (100, 1) and (-100, 1), both labelled 1, one of two entries sent a
// step. The first entries cancel; Top-k sends nothing else for 99 steps. Step 99 is a tie in exact
// arithmetic, so rounding decides it.
struct ToyTrace {
  // [t]: after t steps, 0 to `iterations`.
  std::vector<double> loss;  // mean over both points
  std::vector<std::array<double, 2>> weights;
  // [t]: what worker 0 and worker 1 sent in step t; empty if the method is dense.
  std::vector<std::array<std::uint32_t, 2>> sent;
};
// From w = (0, 1) at learning rate 0.9 and density 0.5. options.name: dense, or a method that sends exactly
// one entry.
ToyTrace toy_trace(const CompressOptions& options, int iterations);

}  // namespace topknot
