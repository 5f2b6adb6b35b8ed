#pragma once
// Activation functions, once for CPU and GPU: value(x) and slope(x), its derivative. A NaN stays one.

#include <cstdint>
#include <cstring>

#include "nn/base/host_device.h"

namespace topknot {

enum class ActivationKind { clamp, hardswish, sigmoid, silu, gelu, gelu_tanh };

struct ActivationRule {
  ActivationKind kind = ActivationKind::clamp;
  float low = 0, high = 0;  // of clamp
};

// e^x for x <= 0, within 2 units in the last place; below -87 that of -87. Branch-free, so that loops over it
// are vectorised, and of single operations, so that CPU and GPU give the same bits. e^x = 2^n e^r with |r| <=
// ln(2) / 2, e^r by its Taylor series to the seventh term.
TOPKNOT_HOST_DEVICE float exp_of_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it ends in the bits of the nearest integer
  const float rounded = x * 1.44269504f + kRound;
  const float n = rounded - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  float sum = 1.98412698e-4f;
  sum = sum * r + 1.38888889e-3f;
  sum = sum * r + 8.33333333e-3f;
  sum = sum * r + 4.16666667e-2f;
  sum = sum * r + 1.66666667e-1f;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  std::uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  bits = (bits + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

TOPKNOT_HOST_DEVICE float sigmoid_of(float x) {
  const float e = exp_of_negative(x < 0 ? x : -x);
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

struct ClampRule {  // min(max(x, low), high), hardtanh of those limits; relu6 is that of 0 and 6
  float low, high;
  TOPKNOT_HOST_DEVICE float value(float x) const { return x < low ? low : x > high ? high : x; }
  TOPKNOT_HOST_DEVICE float slope(float x) const { return x <= low || x >= high ? 0.0f : 1.0f; }
};
struct HardswishRule {  // x min(max(x + 3, 0), 6) / 6
  TOPKNOT_HOST_DEVICE float value(float x) const {
    const float t = x + 3.0f;
    return (t < 0.0f ? -0.0f : x) * ((t < 0.0f ? 0.0f : t > 6.0f ? 6.0f : t) * (1.0f / 6.0f));
  }
  TOPKNOT_HOST_DEVICE float slope(float x) const {
    return x <= -3.0f ? 0.0f : x >= 3.0f ? 1.0f : x * (1.0f / 3.0f) + 0.5f;
  }
};
struct SigmoidRule {  // 1 / (1 + e^-x)
  TOPKNOT_HOST_DEVICE float value(float x) const { return sigmoid_of(x); }
  TOPKNOT_HOST_DEVICE float slope(float x) const {
    const float s = sigmoid_of(x);
    return s * (1.0f - s);
  }
};
// Both are 0 below -87, where x would grow further than sigmoid_of(), which stays the same, can hold.
struct SiluRule {  // x / (1 + e^-x)
  TOPKNOT_HOST_DEVICE float value(float x) const { return (x < -87.0f ? -0.0f : x) * sigmoid_of(x); }
  TOPKNOT_HOST_DEVICE float slope(float x) const {
    const float s = sigmoid_of(x), near = x > 87.0f ? 87.0f : x;  // infinity times 0 is no number
    return x < -87.0f ? -0.0f : s * (1.0f + near * (1.0f - s));
  }
};

// x Phi(x), Phi the standard normal distribution (Hendrycks, Gimpel, "Gaussian error linear units", arXiv
// 1606.08415, section 2). Phi(-|x|) = erfc(|x| / sqrt(2)) / 2 by Abramowitz and Stegun, "Handbook of
// mathematical functions", 7.1.26, whose erf is within 1.5e-7. Value and slope are within 3e-7 max(1, |y|);
// about 25 operations, one of them a division. Below -13 both are 0.
struct GeluRule {
  TOPKNOT_HOST_DEVICE float value(float x) const {
    return (x < -13.0f ? -0.0f : x) * distribution(x, density_exp(x));
  }
  TOPKNOT_HOST_DEVICE float slope(float x) const {  // Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)
    const float e = density_exp(x), near = x > 13.0f ? 13.0f : x;
    return x < -13.0f ? -0.0f : distribution(x, e) + near * (e * 0.398942280f);
  }

 private:
  TOPKNOT_HOST_DEVICE static float density_exp(float x) { return exp_of_negative((-0.5f * x) * x); }
  // Phi(x), with e = exp(-x^2 / 2).
  TOPKNOT_HOST_DEVICE static float distribution(float x, float e) {
    const float t = 1.0f / (1.0f + 0.231641888f * (x < 0 ? -x : x));  // 0.3275911 / sqrt(2)
    float sum = 0.5307027145f;                                        // halves of the source's coefficients
    sum = sum * t - 0.7265760135f;
    sum = sum * t + 0.7107068705f;
    sum = sum * t - 0.142248368f;
    sum = sum * t + 0.127414796f;
    const float tail = sum * t * e;
    return x < 0 ? tail : 1.0f - tail;
  }
};
// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (ibid.; GPT-2's, "gelu_new" elsewhere) = x s(z) with s
// the logistic function and z twice the argument of tanh. Value and slope are within 2e-7 max(1, |y|); below
// -10 both are 0.
struct GeluTanhRule {
  TOPKNOT_HOST_DEVICE float value(float x) const {
    return (x < -10.0f ? -0.0f : x) * sigmoid_of(x * (kLinear + kCubic * (x * x)));
  }
  TOPKNOT_HOST_DEVICE float slope(float x) const {  // s(z) + x z' s(z) s(-z)
    const float near = x < -10.0f ? -10.0f : x > 10.0f ? 10.0f : x, square = near * near;
    const float z = near * (kLinear + kCubic * square), e = exp_of_negative(z < 0 ? z : -z);
    const float larger = 1.0f / (1.0f + e), smaller = e * larger;  // of s(z) and s(-z)
    const float steep = near * (kLinear + 3.0f * kCubic * square);
    return x < -10.0f ? -0.0f : (z < 0 ? smaller : larger) + steep * (smaller * larger);
  }

 private:
  static constexpr float kLinear = 1.5957691216f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.071354816f;    // that times 0.044715
};

// fn(rule) with the rule's own type, inlined: loops over it are compiled for each instruction set.
template <class Fn>
inline __attribute__((always_inline)) void by_kind(const ActivationRule& rule, const Fn& fn) {
  switch (rule.kind) {
    case ActivationKind::clamp:
      return fn(ClampRule{rule.low, rule.high});
    case ActivationKind::hardswish:
      return fn(HardswishRule{});
    case ActivationKind::sigmoid:
      return fn(SigmoidRule{});
    case ActivationKind::silu:
      return fn(SiluRule{});
    case ActivationKind::gelu:
      return fn(GeluRule{});
    case ActivationKind::gelu_tanh:
      return fn(GeluTanhRule{});
  }
}

}  // namespace topknot
