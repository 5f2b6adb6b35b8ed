#pragma once
// The selection of each selector and its cost, under error feedback (memory `residual`) on one rank: over
// recorded gradients, and over synthetic ones of many sizes. `experiment selection` makes tables and plots of
// it.

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"

namespace topknot {

struct SelectionMethod {
  std::string label;        // the selector's name; where it has variants, with the variant
  CompressOptions options;  // options.select is set
};
// All registered selectors: topk first, threshold last, between them by name. sidco is there once for each of
// its distributions. The fixed threshold is 0 here; the measurements set it to topk's median k-th magnitude.
std::vector<SelectionMethod> selection_methods();

// --- Over recorded gradients ---

// Step t's gradient into `out`.
using GradientSource = std::function<void(std::size_t t, std::span<float> out)>;

struct SelectionQuality {
  std::string label;
  double density = 0;
  std::size_t k = 0, steps = 0;  // steps: those that count
  // Selected entries over k; the share of steps where that is within 0.9 to 1.1.
  double count_mean = 0, count_least = 0, count_greatest = 0, within = 0;
  // |sent|^2 / |u|^2, and |sent|^2 over that of u's own k largest entries; means over the steps where u is
  // not zero. The second is above 1 if more than k entries are sent.
  double energy = 0, energy_to_topk = 0;
  double threshold = 0;  // the median over steps
};
// `steps` gradients of `numel` elements, one after the other; the first `skip` (fewer than `steps`) fill the
// residual and do not count. One entry per method and density, methods of one density together. Throws
// UserError if a gradient has a NaN or an infinity.
std::vector<SelectionQuality> selection_quality(const std::vector<SelectionMethod>& methods,
                                                const std::vector<double>& densities, std::size_t steps,
                                                std::size_t numel, std::size_t skip,
                                                const GradientSource& gradient);

// --- Over sizes ---

struct SelectionCost {
  std::string label;
  std::size_t size = 0, k = 0;
  int rounds = 0, warmup = 0;
  // Medians over the rounds: milliseconds of the plain pass r += g, of a step (add the residual, select, take
  // what is sent out of the residual, the selector's commit), and of their ratios, each within a round.
  double plain_ms = 0, step_ms = 0, ratio = 0;
  double ratio_least = 0, ratio_greatest = 0;  // quartiles
  // The least step over the least plain pass: the ratio without interruptions on a busy machine.
  double lowest_ratio = 0;
  double count = 0;  // entries over k, the median
};
// Steps on synthetic gradients: Laplace noise of scale 1, new at each step, plus a drift of a twentieth of it
// that stays. Plain pass and step alternate which goes first.
std::vector<SelectionCost> selection_cost(const std::vector<SelectionMethod>& methods, std::size_t size,
                                          double density, int rounds, int warmup);
// Bytes that selection_cost() takes for a size, generously.
std::size_t selection_cost_bytes(std::size_t size);

}  // namespace topknot
