#pragma once
// The score of an entry that was sent in the last step (compress/select/regtopk.cpp), for CPUs and kernels.

#include <cmath>

#include "compress/select/passes/keys.h"

namespace topknot {

struct CompressOptions;

struct RegTopKScore {
  double mu = 0;
  double rest = 1;          // tanh((1 + Q) / mu)
  bool by_current = false;  // variant B

  // The score of u, with its sign. `weight`: w; `own`: w p; `surplus`: avg - w p. `largest`: of floats.
  TOPKNOT_HOST_DEVICE float operator()(float u, double weight, double own, double surplus,
                                       float largest) const {
    constexpr double away_from_zero = 1e-10;  // of variant B's denominator
    const double a = static_cast<double>(u);
    const double denominator = by_current ? weight * a + away_from_zero : own;
    const double factor = ::tanh(::fabs(1 + surplus / denominator) / mu) / rest;
    // Nothing was sent that could be compared: Delta is Q.
    if (denominator == 0 || factor != factor) return u;
    const double score = a * factor, bound = static_cast<double>(largest);
    return static_cast<float>(score > bound ? bound : score < -bound ? -bound : score);
  }

  // The key above which entries are listed, so that every score above `bound` is among them: a score is at
  // most |u| / rest.
  TOPKNOT_HOST_DEVICE MagnitudeKey listed_above(const CarriedBound& bound, bool all) const {
    if (!bound.known() || all || !(rest < 1)) return bound.above(all);
    const MagnitudeKey lower = key_below((1 - 1e-6) * rest * bound.magnitude()) - 1;
    return lower > -1 ? lower : -1;
  }
};

// compress.mu, .q and .variant. Throws UserError for values outside their ranges.
RegTopKScore regtopk_score(const CompressOptions& options);

}  // namespace topknot
