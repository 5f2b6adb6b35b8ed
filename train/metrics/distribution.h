#pragma once
// The shape of an accumulated gradient and how much of it the k largest entries hold. What Shi, Chu, Cheung,
// See, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv 1911.08772, section 3, look at.

#include <span>

#include "train/metrics/metrics.h"

namespace topknot {

inline constexpr int kHistogramBins = 101;  // over [-kHistogramReach, kHistogramReach) deviations
inline constexpr double kHistogramReach = 8;
inline constexpr int kLeastExponent = -40, kGreatestExponent = 8;  // of the magnitudes' bins

// Everything of the record but step and epoch. `u`: one value or more, all finite, else Error; density in
// (0, 1]. The deviation is a sample's (n - 1). Where it is 0 all elements count in the middle bin.
DistributionRecord distribution_of(std::span<const float> u, double density);

}  // namespace topknot
