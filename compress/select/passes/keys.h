#pragma once
// Magnitudes as integers. The bits of a float without the sign, read as an integer, order as the magnitudes
// do; infinities and NaNs come above every finite number, so one integer comparison finds large and broken
// values alike. For CPU loops and for kernels.

#include <cstdint>
#include <cstring>

#include "nn/base/host_device.h"

namespace topknot {

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

// The key such that key_of(x) > key exactly where |x| > t, for every x; -1 where every magnitude exceeds t. t
// is no NaN.
TOPKNOT_HOST_DEVICE MagnitudeKey key_below(double t) {
  if (t < 0) return -1;
  const float x = static_cast<float>(t);
  const MagnitudeKey key = key_of(x) - (static_cast<double>(x) > t ? 1 : 0);
  return key < kLargestFinite ? key : kLargestFinite;
}

}  // namespace topknot
