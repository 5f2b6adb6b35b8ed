#pragma once
// Hot loops are written once over 16 lanes and compiled three times; the best version is picked at start-up.
// Lanes are independent and contraction is off, so all versions give the same bits.
//
// A version hands no Lanes to a function itself: it calls a TOPKNOT_INLINE function that does (clang refuses
// vectors between functions that it holds for compiled for different machines).

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && !defined(TOPKNOT_SINGLE_VERSION)
#define TOPKNOT_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TOPKNOT_MULTIVERSION
#endif
#define TOPKNOT_INLINE inline __attribute__((always_inline))

#include "nn/core/bfloat16.h"

namespace topknot {

typedef float Lanes __attribute__((vector_size(64)));   // 16 floats
typedef float Lanes8 __attribute__((vector_size(32)));  // 8 floats: a channel block without AVX-512
typedef int LaneMask __attribute__((vector_size(64)));  // comparison results: 0 or -1 per lane
inline constexpr std::size_t kLanes = 16;

template <class V>
TOPKNOT_INLINE V load_as(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
TOPKNOT_INLINE void store_as(float* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// bfloat16 in memory, floats in registers; a store rounds as to_bfloat16() does.
template <class V>
struct HalfLanes;
template <>
struct HalfLanes<Lanes> {
  typedef std::uint16_t Half __attribute__((vector_size(32)));
  typedef std::uint32_t Word __attribute__((vector_size(64)));
};
template <>
struct HalfLanes<Lanes8> {
  typedef std::uint16_t Half __attribute__((vector_size(16)));
  typedef std::uint32_t Word __attribute__((vector_size(32)));
};
template <class V>
TOPKNOT_INLINE V load_as(const BFloat16* p) {
  if constexpr (sizeof(V) == sizeof(float)) {
    return to_float(*p);
  } else {
    typename HalfLanes<V>::Half half;
    std::memcpy(&half, p, sizeof half);
    const typename HalfLanes<V>::Word word = __builtin_convertvector(half, typename HalfLanes<V>::Word) << 16;
    V v;
    std::memcpy(&v, &word, sizeof v);
    return v;
  }
}
template <class V>
TOPKNOT_INLINE void store_as(BFloat16* p, V v) {
  if constexpr (sizeof(V) == sizeof(float)) {
    *p = to_bfloat16(v);
  } else {
    typename HalfLanes<V>::Word word;
    std::memcpy(&word, &v, sizeof word);
    const auto rounded = word + 0x7FFF + ((word >> 16) & 1);
    word = ((word & 0x7FFFFFFF) > 0x7F800000 ? word | 0x400000 : rounded) >> 16;
    const auto half = __builtin_convertvector(word, typename HalfLanes<V>::Half);
    std::memcpy(static_cast<void*>(p), &half, sizeof half);
  }
}

// fn(i, V()) for elements [0, n): V is Lanes8, of the 8 from the i-th on, then, for what is left, float. Fn is
// always inlined. (GCC keeps wider vectors in memory without AVX-512.)
TOPKNOT_INLINE void in_lanes(std::int64_t n, const auto& fn) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) fn(i, Lanes8{});
  for (; i < n; ++i) fn(i, 0.0f);
}

TOPKNOT_INLINE Lanes load(const float* p) {
  return load_as<Lanes>(p);
}
TOPKNOT_INLINE void store(float* p, Lanes v) {
  store_as(p, v);
}
TOPKNOT_INLINE Lanes splat(float x) {
  return Lanes{} + x;
}

// Stores past the caches, for what is not read soon: a plain store would first read the line that it writes
// to. Writes v to `to`, aligned to 64 bytes. V has 64 bytes. Others see it after finish_streaming().
template <class V>
TOPKNOT_INLINE void stream(void* to, V v) {
  static_assert(sizeof(V) == 64);
#if defined(__x86_64__)
  __m128i pieces[4];
  std::memcpy(pieces, &v, sizeof v);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(static_cast<__m128i*>(to) + i, pieces[i]);
#else
  std::memcpy(to, &v, sizeof v);
#endif
}
TOPKNOT_INLINE void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// x[i] *= factor for i < n, in the calling thread.
void multiply(float* x, std::size_t n, float factor);

// exp, the logistic function and tanh of 16 lanes, with the same bits in every version that
// TOPKNOT_MULTIVERSION makes. Polynomials of Moshier's Cephes library in single precision (expf.c, tanhf.c).

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
