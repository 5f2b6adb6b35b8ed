#pragma once
// compress/select/passes/keys.h and carried_bound.h once more, of floats, for kernels: the same numbers, bit for bit. C++17.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "nn/core/host_device.h"

namespace topknot::cuda {

// The bits of a float without the sign: orders as magnitudes do, infinities and NaNs above every finite number.
using GpuKey = std::int32_t;
inline constexpr GpuKey kLargestFinite = 0x7f7fffff;

TOPKNOT_HOST_DEVICE GpuKey gpu_key(float x) {
  GpuKey bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}
TOPKNOT_HOST_DEVICE float gpu_magnitude(GpuKey key) {
  float x;
  memcpy(&x, &key, sizeof x);
  return x;
}

// The key such that gpu_key(x) > key exactly where |x| > t; -1 where every magnitude exceeds t. t is no NaN.
TOPKNOT_HOST_DEVICE GpuKey gpu_key_below(double t) {
  if (t < 0) return -1;
  const float x = static_cast<float>(t);
  const GpuKey key = gpu_key(x) - (static_cast<double>(x) > t ? 1 : 0);
  return key < kLargestFinite ? key : kLargestFinite;
}

// target_count() of compress/compressor.h: k = max(1, floor(density * n)), n where density >= 1.
TOPKNOT_HOST_DEVICE std::uint32_t gpu_target_count(double density, std::size_t n) {
  if (density >= 1) return static_cast<std::uint32_t>(n);
  const double k = floor(density * static_cast<double>(n));
  const std::size_t count = k > 1 ? static_cast<std::size_t>(k) : 1;
  return static_cast<std::uint32_t>(count < n ? count : n);
}

// CarriedBound<float>.
struct GpuBound {
  GpuKey kth = -1;       // the k-th key of the last committed step; -1: none
  double margin = 0.02;  // the bound is (1 - margin) times that magnitude

  // What lists are collected with: nothing but NaN and Inf where no bound is known.
  TOPKNOT_HOST_DEVICE GpuKey above() const {
    if (kth < 0) return kLargestFinite;
    return gpu_key_below((1.0 - margin) * static_cast<double>(gpu_magnitude(kth)));
  }

  enum class List : std::int32_t { good, too_few, too_many };
  TOPKNOT_HOST_DEVICE GpuBound after(GpuKey now, List list) const {
    constexpr double smallest = 0.004, largest = 0.1;
    GpuBound next = *this;
    next.kth = now;
    if (kth <= 0) return next;
    const double fall =
        1.0 - static_cast<double>(gpu_magnitude(now)) / static_cast<double>(gpu_magnitude(kth));
    const double slowly = 0.9 * margin, falling = 3.0 * fall;
    double wanted = slowly < falling ? falling : slowly;
    if (list != List::good) wanted = margin * (list == List::too_many ? 0.5 : 2.0);
    next.margin = wanted < smallest ? smallest : wanted > largest ? largest : wanted;
    return next;
  }
};

}  // namespace topknot::cuda
