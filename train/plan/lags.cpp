#include "train/plan/lags.h"

#include <algorithm>
#include <cmath>

#include "nn/core/base/check.h"

namespace topknot {

std::vector<double> lags_densities(const std::vector<double>& times, const std::vector<std::size_t>& sizes,
                                   double alpha, double beta, int ranks, double base) {
  TOPKNOT_CHECK(times.size() == sizes.size(), "one time a layer");
  TOPKNOT_CHECK(beta > 0 && alpha >= 0 && ranks >= 1 && base > 0 && base <= 1, "out of range");
  std::vector<double> densities(times.size(), base);
  if (ranks == 1) return densities;
  for (std::size_t i = 0; i < times.size(); ++i) {
    TOPKNOT_CHECK(sizes[i] > 0 && std::isfinite(times[i]), "a layer without elements or time");
    const double left = times[i] - std::log2(static_cast<double>(ranks)) * alpha;
    if (left <= 0) continue;
    double density = left / (2.0 * (ranks - 1) * beta * static_cast<double>(sizes[i]));
    if (density > 1) density = 0.05;
    densities[i] = std::max(density, base);
  }
  return densities;
}

}  // namespace topknot
