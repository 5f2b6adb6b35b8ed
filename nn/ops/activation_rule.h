#pragma once
// Activation functions, once for CPU and GPU: value(x) and slope(x), its derivative. A NaN stays one. V is
// float or, on a CPU, a vector of floats (nn/core/simd.h), as which GCC compiles no branch.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "nn/base/host_device.h"

// Inlined on a CPU too, into loops that are compiled for each instruction set.
#define TOPKNOT_RULE __attribute__((always_inline)) TOPKNOT_HOST_DEVICE

namespace topknot {

enum class ActivationKind { clamp, hardswish, sigmoid, silu, gelu, gelu_tanh };

struct ActivationRule {
  ActivationKind kind = ActivationKind::clamp;
  float low = 0, high = 0;  // of clamp
};

// The bits of V's floats: whole numbers of 32 bits.
template <class V>
using FloatBits = std::conditional_t<std::is_same_v<V, float>, std::int32_t, decltype(V{} < V{})>;

// e^x for x <= 0, within 2 units in the last place; below -87 that of -87. Of single operations, so that CPU
// and GPU give the same bits. e^x = 2^n e^r with |r| <= ln(2) / 2, e^r by its Taylor series to the seventh
// term.
template <class V>
TOPKNOT_RULE V exp_of_negative(V x) {
  x = x < -87.0f ? V{} - 87.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it ends in the bits of the nearest integer
  const V rounded = x * 1.44269504f + kRound;
  const V n = rounded - kRound;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  V sum = r * 1.98412698e-4f + 1.38888889e-3f;
  sum = sum * r + 8.33333333e-3f;
  sum = sum * r + 4.16666667e-2f;
  sum = sum * r + 1.66666667e-1f;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  FloatBits<V> bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;
  V power;
  std::memcpy(&power, &bits, sizeof power);
  return sum * power;
}

template <class V>
TOPKNOT_RULE V sigmoid_of(V x) {
  const V e = exp_of_negative(x < 0 ? x : -x);
  return (x < 0 ? e : V{} + 1.0f) / (1.0f + e);
}

struct ClampRule {  // min(max(x, low), high), hardtanh of those limits; relu6 is that of 0 and 6
  float low, high;
  template <class V>
  TOPKNOT_RULE V value(V x) const {
    const V above = x < low ? V{} + low : x;
    return x > high ? V{} + high : above;
  }
  template <class V>
  TOPKNOT_RULE V slope(V x) const {
    const V below = x >= high ? V{} : V{} + 1.0f;
    return x <= low ? V{} : below;
  }
};
struct HardswishRule {  // x min(max(x + 3, 0), 6) / 6
  template <class V>
  TOPKNOT_RULE V value(V x) const {
    const V t = x + 3.0f, least = t < 0.0f ? V{} : t;
    return (t < 0.0f ? -V{} : x) * ((t > 6.0f ? V{} + 6.0f : least) * (1.0f / 6.0f));
  }
  template <class V>
  TOPKNOT_RULE V slope(V x) const {
    const V inside = x * (1.0f / 3.0f) + 0.5f, below = x >= 3.0f ? V{} + 1.0f : inside;
    return x <= -3.0f ? V{} : below;
  }
};
struct SigmoidRule {  // 1 / (1 + e^-x)
  template <class V>
  TOPKNOT_RULE V value(V x) const {
    return sigmoid_of(x);
  }
  template <class V>
  TOPKNOT_RULE V slope(V x) const {
    const V s = sigmoid_of(x);
    return s * (1.0f - s);
  }
};
// Both are 0 below -87, where x would grow further than sigmoid_of(), which stays the same, can hold.
struct SiluRule {  // x / (1 + e^-x)
  template <class V>
  TOPKNOT_RULE V value(V x) const {
    return (x < -87.0f ? -V{} : x) * sigmoid_of(x);
  }
  template <class V>
  TOPKNOT_RULE V slope(V x) const {
    const V s = sigmoid_of(x), near = x > 87.0f ? V{} + 87.0f : x;  // infinity times 0 is no number
    return x < -87.0f ? -V{} : s * (1.0f + near * (1.0f - s));
  }
};

// x Phi(x), Phi the standard normal distribution (Hendrycks, Gimpel, "Gaussian error linear units", arXiv
// 1606.08415, section 2). Phi(-|x|) = erfc(|x| / sqrt(2)) / 2 by Abramowitz and Stegun, "Handbook of
// mathematical functions", 7.1.26, whose erf is within 1.5e-7. Value and slope are within 3e-7 max(1, |y|);
// about 25 operations, one of them a division. Below -13 both are 0.
struct GeluRule {
  template <class V>
  TOPKNOT_RULE V value(V x) const {
    return (x < -13.0f ? -V{} : x) * distribution(x, density_exp(x));
  }
  template <class V>
  TOPKNOT_RULE V slope(V x) const {  // Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)
    const V e = density_exp(x), near = x > 13.0f ? V{} + 13.0f : x;
    return x < -13.0f ? -V{} : distribution(x, e) + near * (e * 0.398942280f);
  }

 private:
  template <class V>
  TOPKNOT_RULE static V density_exp(V x) {
    return exp_of_negative((-0.5f * x) * x);
  }
  // Phi(x), with e = exp(-x^2 / 2).
  template <class V>
  TOPKNOT_RULE static V distribution(V x, V e) {
    const V t = 1.0f / (1.0f + 0.231641888f * (x < 0 ? -x : x));  // 0.3275911 / sqrt(2)
    V sum = t * 0.5307027145f - 0.7265760135f;                    // halves of the source's coefficients
    sum = sum * t + 0.7107068705f;
    sum = sum * t - 0.142248368f;
    sum = sum * t + 0.127414796f;
    const V tail = sum * t * e;
    return x < 0 ? tail : 1.0f - tail;
  }
};
// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (ibid.; GPT-2's, "gelu_new" elsewhere) = x s(z) with s
// the logistic function and z twice the argument of tanh. Value and slope are within 2e-7 max(1, |y|); below
// -10 both are 0.
struct GeluTanhRule {
  template <class V>
  TOPKNOT_RULE V value(V x) const {
    return (x < -10.0f ? -V{} : x) * sigmoid_of(x * (kLinear + kCubic * (x * x)));
  }
  template <class V>
  TOPKNOT_RULE V slope(V x) const {  // s(z) + x z' s(z) s(-z)
    const V least = x < -10.0f ? V{} - 10.0f : x, near = x > 10.0f ? V{} + 10.0f : least;
    const V square = near * near, z = near * (kLinear + kCubic * square);
    const V e = exp_of_negative(z < 0 ? z : -z);
    const V larger = 1.0f / (1.0f + e), smaller = e * larger;  // of s(z) and s(-z)
    const V steep = near * (kLinear + 3.0f * kCubic * square);
    return x < -10.0f ? -V{} : (z < 0 ? smaller : larger) + steep * (smaller * larger);
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

#undef TOPKNOT_RULE
