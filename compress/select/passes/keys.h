#pragma once
// Definitions that selection on the CPU and in kernels shares: how many entries a density asks for,
// magnitudes as integers, and the bound that selectors of exactly k carry from step to step.
//
// The bits of a float without the sign, read as an integer, order as the magnitudes do; infinities and NaNs
// come above every finite number, so one integer comparison finds large and broken values alike.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "nn/base/host_device.h"

namespace topknot {

// k = max(1, floor(density * d)), computed in double, at most d; d where density >= 1. density > 0.
TOPKNOT_HOST_DEVICE std::size_t density_count(double density, std::size_t d) {
  if (density >= 1) return d;
  const double k = ::floor(density * static_cast<double>(d));
  const std::size_t count = k > 1 ? static_cast<std::size_t>(k) : 1;
  return count < d ? count : d;
}

using MagnitudeKey = std::int32_t;
inline constexpr MagnitudeKey kLargestFinite = 0x7f7fffff;

TOPKNOT_HOST_DEVICE MagnitudeKey key_of(float x) {
  MagnitudeKey bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}
TOPKNOT_HOST_DEVICE float magnitude_of(MagnitudeKey key) {
  float x;
  memcpy(&x, &key, sizeof x);
  return x;
}

// The largest of n keys, 0 of none; above kLargestFinite with a NaN or Inf. On a CPU, on one thread.
MagnitudeKey largest_key(const float* x, std::size_t n);

// The key such that key_of(x) > key exactly where |x| > t, for every x; -1 if all exceed t. t is no NaN.
TOPKNOT_HOST_DEVICE MagnitudeKey key_below(double t) {
  if (t < 0) return -1;
  const float x = static_cast<float>(t);
  const MagnitudeKey key = key_of(x) - (static_cast<double>(x) > t ? 1 : 0);
  return key < kLargestFinite ? key : kLargestFinite;
}

// How long a list gets before radix selection over the vector is the cheaper way to the k largest.
TOPKNOT_HOST_DEVICE std::size_t list_limit(std::size_t k) {
  return 8 * k + 4096;
}

// The outcome of listing the entries above a bound.
enum class ListState : std::int32_t { good, too_few, too_many };
// `complete`: the list holds all entries above the bound, `count` of them.
TOPKNOT_HOST_DEVICE ListState list_state(bool complete, std::size_t count, std::size_t k) {
  return !complete ? ListState::too_many : count < k ? ListState::too_few : ListState::good;
}

// The bound by which selectors of exactly k (topk, regtopk) get along with one pass: the k-th key of the last
// committed step, lowered by a margin that follows how much the k-th key falls between steps. The pass that
// adds the residual lists what exceeds the bound; if the list is too short or too long, radix selection gives
// the answer. So the bound decides how fast the answer comes, never what it is, and need not be saved.
struct CarriedBound {
  MagnitudeKey kth = -1;  // the k-th key of the last committed step; -1: none
  double margin = 0.02;   // the bound is (1 - margin) times that magnitude

  TOPKNOT_HOST_DEVICE bool known() const { return kth >= 0; }
  // The bound; if known().
  TOPKNOT_HOST_DEVICE double magnitude() const {
    return (1.0 - margin) * static_cast<double>(magnitude_of(kth));
  }
  // The bound for listing. Without a carried bound, or if all entries are sent, lists find only NaN and Inf.
  TOPKNOT_HOST_DEVICE MagnitudeKey above(bool all) const {
    return known() && !all ? key_below(magnitude()) : kLargestFinite;
  }

  // The bound after a step whose k-th key is `now`. Too many listed mean a margin too wide, too few one too
  // narrow. Else the margin takes three times the last fall at once and shrinks slowly.
  TOPKNOT_HOST_DEVICE CarriedBound after(MagnitudeKey now, ListState list) const {
    constexpr double smallest = 0.004, largest = 0.1;
    CarriedBound next = *this;
    next.kth = now;
    if (kth <= 0) return next;
    const double fall = 1.0 - static_cast<double>(magnitude_of(now)) / static_cast<double>(magnitude_of(kth));
    const double slowly = 0.9 * margin, falling = 3.0 * fall;
    double wanted = slowly < falling ? falling : slowly;
    if (list != ListState::good) wanted = margin * (list == ListState::too_many ? 0.5 : 2.0);
    next.margin = wanted < smallest ? smallest : wanted > largest ? largest : wanted;
    return next;
  }
};

inline bool operator==(const CarriedBound& a, const CarriedBound& b) {
  return a.kth == b.kth && a.margin == b.margin;
}

}  // namespace topknot
