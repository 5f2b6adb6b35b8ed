#pragma once
// exp, the logistic function and tanh of 16 lanes, with the same bits in every version that TOPKNOT_MULTIVERSION makes.
// Polynomials of Moshier's Cephes library in single precision (expf.c, tanhf.c). A NaN stays one.

#include "nn/core/simd.h"

namespace topknot {

// The first `n` lanes, n from 1 to 16; the others are 0.
TOPKNOT_INLINE Lanes load_part(const float* p, std::size_t n) {
  if (n == kLanes) return load(p);
  Lanes v{};
  std::memcpy(&v, p, n * sizeof(float));
  return v;
}
TOPKNOT_INLINE Lanes load_part(const BFloat16* p, std::size_t n) {
  if (n == kLanes) return load_as<Lanes>(p);
  BFloat16 all[kLanes] = {};
  std::memcpy(static_cast<void*>(all), p, n * sizeof(BFloat16));
  return load_as<Lanes>(all);
}
TOPKNOT_INLINE void store_part(float* p, Lanes v, std::size_t n) {
  if (n == kLanes) return store(p, v);
  std::memcpy(p, &v, n * sizeof(float));
}
TOPKNOT_INLINE void store_part(BFloat16* p, Lanes v, std::size_t n) {
  if (n == kLanes) return store_as<Lanes>(p, v);
  BFloat16 all[kLanes];
  store_as<Lanes>(all, v);
  std::memcpy(static_cast<void*>(p), all, n * sizeof(BFloat16));
}

// exp(x), relative error below 2e-7; arguments beyond +-87 count as +-87.
TOPKNOT_INLINE Lanes exp_lanes(Lanes x) {
  constexpr float kMost = 87.0f;
  x = x > kMost ? splat(kMost) : x;
  x = x < -kMost ? splat(-kMost) : x;
  // exp(x) = 2^n exp(r) with n = round(x / ln 2). Adding 1.5 * 2^23 leaves n in the lowest bits of the sum.
  constexpr float kRound = 12582912.0f;
  const Lanes shifted = x * 1.44269504088896341f + kRound, n = shifted - kRound;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  LaneMask bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;  // 2^n
  Lanes power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// 1 / (1 + exp(-x)), absolute error below 2e-7
TOPKNOT_INLINE Lanes sigmoid_lanes(Lanes x) {
  return 1.0f / (1.0f + exp_lanes(-x));
}

// tanh(x), relative error below 4e-7
TOPKNOT_INLINE Lanes tanh_lanes(Lanes x) {
  const Lanes magnitude = x < 0.0f ? -x : x, square = x * x;
  Lanes p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Lanes small = x + x * square * p;
  const Lanes large = 1.0f - 2.0f / (exp_lanes(magnitude + magnitude) + 1.0f);
  return magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
}

}  // namespace topknot
