#pragma once
// GaussianK's rule (compress/select/gaussiank.cpp): when a normal distribution is fitted, the thresholds that
// its corrections can reach, and where they end. Written once for the CPU and for kernels.

#include <cstddef>

#include "compress/select/passes/quantiles.h"

namespace topknot::gaussiank {

inline constexpr std::size_t kSmallestFit = 2048;    // elements below which moments say too little
inline constexpr std::size_t kMomentsChunk = 16384;  // kChunk of compress/parallel.h: sums are made by chunk
inline constexpr int kEvaluations = 3;               // of a threshold; the last one counts
inline constexpr int kLevels = 6;                    // thresholds that so many evaluations can reach

TOPKNOT_HOST_DEVICE bool is_finite(double x) {
  return x - x == 0;
}

// If the vector is selected exactly without a look at its moments.
TOPKNOT_HOST_DEVICE bool too_small(std::size_t k, std::size_t n) {
  return n < kSmallestFit || k == n;
}

enum class Way : int { nothing, exact, rule };
// How k of n elements are selected: none of zeros or with a NaN or Inf, exactly if a fit means nothing.
TOPKNOT_HOST_DEVICE Way way_of(bool finite, bool zero, std::size_t k, std::size_t n, const NormalFit& fit) {
  if (!finite) return Way::nothing;
  if (too_small(k, n)) return Way::exact;
  if (zero) return Way::nothing;
  return fit.deviation > 0 && is_finite(fit.deviation) && is_finite(fit.mean) ? Way::rule : Way::exact;
}

// Level i: t times 1, 0.5, 1.5, 0.25, 0.75 and 2.25. Halving is exact, so 0.75 has one value.
struct Thresholds {
  double level[kLevels];
};
TOPKNOT_HOST_DEVICE Thresholds thresholds_from(double t) {
  return {{t, t * 0.5, t * 1.5, t * 0.5 * 0.5, t * 0.5 * 1.5, t * 1.5 * 1.5}};
}

// The level after one that too few (else too many) exceed; of levels 0 to 2.
TOPKNOT_HOST_DEVICE int next_level(int level, bool few) {
  constexpr int fewer[] = {2, 4, 5}, more[] = {1, 3, 4};
  return few ? more[level] : fewer[level];
}

TOPKNOT_HOST_DEVICE bool too_many(std::size_t count, std::size_t k) {
  return static_cast<double>(count) > 4 * static_cast<double>(k) / 3;
}

// The level at which the rule ends: down where fewer than 2k/3 exceed a threshold, up if more than 4k/3 do.
// count_at(evaluation, level) gives how many exceed the level's threshold.
TOPKNOT_HOST_DEVICE int last_level(std::size_t k, const auto& count_at) {
  int level = 0;
  for (int evaluation = 0;; ++evaluation) {
    const std::size_t count = count_at(evaluation, level);
    const bool few = static_cast<double>(count) < 2 * static_cast<double>(k) / 3, many = too_many(count, k);
    if ((!few && !many) || evaluation + 1 == kEvaluations) return level;
    level = next_level(level, few);
  }
}

}  // namespace topknot::gaussiank
