#include "nn/core/simd.h"
#include "nn/ops/cuda/batch_norm_kernels.h"

// Each loop is written once over a pixel's lanes V: 16 or 8 channels of a blocked tensor, one of a plain
// tensor. Several accumulators hide the latency of the additions; their order is fixed, so results do not
// depend on the CPU.

namespace topknot {
namespace {

template <class V>
inline constexpr std::int64_t lanes = sizeof(V) / sizeof(float);

template <class V>
TOPKNOT_INLINE void sums_of(const ChannelGeometry& g, const float* x, const float* shift, float* sums) {
  constexpr std::int64_t L = lanes<V>;
  for (std::int64_t c = 0; c < g.channels; c += L, x += g.pixels * L) {
    const V m = load_as<V>(shift + c);
    V s0{}, s1{}, s2{}, s3{}, q0{}, q1{}, q2{}, q3{};
    std::int64_t i = 0;
    for (; i + 4 <= g.pixels; i += 4) {
      const V v0 = load_as<V>(x + i * L) - m, v1 = load_as<V>(x + (i + 1) * L) - m,
              v2 = load_as<V>(x + (i + 2) * L) - m, v3 = load_as<V>(x + (i + 3) * L) - m;
      s0 += v0, s1 += v1, s2 += v2, s3 += v3;
      q0 += v0 * v0, q1 += v1 * v1, q2 += v2 * v2, q3 += v3 * v3;
    }
    for (; i < g.pixels; ++i) {
      const V v = load_as<V>(x + i * L) - m;
      s0 += v, q0 += v * v;
    }
    store_as<V>(sums + c, (s0 + s1) + (s2 + s3));
    store_as<V>(sums + g.channels + c, (q0 + q1) + (q2 + q3));
  }
}

template <class V, bool kResidual, bool kRelu>
TOPKNOT_INLINE void apply_of(const ChannelGeometry& g, const float* x, const float* residual, float* y,
                             const float* scale, const float* shift) {
  constexpr std::int64_t L = lanes<V>;
  std::int64_t at = 0;
  for (std::int64_t c = 0; c < g.channels; c += L) {
    const V a = load_as<V>(scale + c), b = load_as<V>(shift + c), zero{};
    for (std::int64_t i = 0; i < g.pixels; ++i, at += L) {
      V v = a * load_as<V>(x + at) + b;
      if constexpr (kResidual) v += load_as<V>(residual + at);
      if constexpr (kRelu) v = v <= zero ? zero : v;  // so that NaN comes through
      store_as<V>(y + at, v);
    }
  }
}

template <class V>
TOPKNOT_INLINE void apply_any(const ChannelGeometry& g, const float* x, const float* residual, float* y,
                              const float* scale, const float* shift, bool relu) {
  if (residual && relu) return apply_of<V, true, true>(g, x, residual, y, scale, shift);
  if (residual) return apply_of<V, true, false>(g, x, residual, y, scale, shift);
  if (relu) return apply_of<V, false, true>(g, x, residual, y, scale, shift);
  apply_of<V, false, false>(g, x, residual, y, scale, shift);
}

template <class V, bool kMask>
TOPKNOT_INLINE void backward_sums_of(const ChannelGeometry& g, const float* grad, const float* y,
                                     const float* x, const float* mean, float* masked, float* sums) {
  constexpr std::int64_t L = lanes<V>;
  std::int64_t at = 0;
  for (std::int64_t c = 0; c < g.channels; c += L) {
    V s0{}, s1{}, q0{}, q1{};
    const V zero{}, m = load_as<V>(mean + c);
    const auto take = [&](std::int64_t i, V & s, V & q) __attribute__((always_inline)) {
      V d = load_as<V>(grad + i);
      if constexpr (kMask) {
        d = load_as<V>(y + i) <= zero ? zero : d;
        store_as<V>(masked + i, d);
      }
      s += d;
      q += d * (load_as<V>(x + i) - m);
    };
    std::int64_t i = 0;
    for (; i + 2 <= g.pixels; i += 2, at += 2 * L) {
      take(at, s0, q0);
      take(at + L, s1, q1);
    }
    for (; i < g.pixels; ++i, at += L) take(at, s0, q0);
    store_as<V>(sums + c, s0 + s1);
    store_as<V>(sums + g.channels + c, q0 + q1);
  }
}

template <class V>
TOPKNOT_INLINE void backward_apply_of(const ChannelGeometry& g, const float* grad, const float* x, float* dx,
                                      const float* a, const float* b, const float* c) {
  constexpr std::int64_t L = lanes<V>;
  std::int64_t at = 0;
  for (std::int64_t channel = 0; channel < g.channels; channel += L) {
    const V va = load_as<V>(a + channel), vb = load_as<V>(b + channel), vc = load_as<V>(c + channel);
    for (std::int64_t i = 0; i < g.pixels; ++i, at += L)
      store_as<V>(dx + at, va * load_as<V>(grad + at) + (vb * load_as<V>(x + at) + vc));
  }
}

}  // namespace

TOPKNOT_MULTIVERSION void bn_image_sums(const ChannelGeometry& g, const float* x, const float* shift,
                                        float* sums) {
  if (g.block == 16) return sums_of<Lanes>(g, x, shift, sums);
  if (g.block == 8) return sums_of<Lanes8>(g, x, shift, sums);
  sums_of<float>(g, x, shift, sums);
}

TOPKNOT_MULTIVERSION void bn_image_apply(const ChannelGeometry& g, const float* x, const float* residual,
                                         float* y, const float* scale, const float* shift, bool relu) {
  if (g.block == 16) return apply_any<Lanes>(g, x, residual, y, scale, shift, relu);
  if (g.block == 8) return apply_any<Lanes8>(g, x, residual, y, scale, shift, relu);
  apply_any<float>(g, x, residual, y, scale, shift, relu);
}

TOPKNOT_MULTIVERSION void bn_image_backward_sums(const ChannelGeometry& g, const float* grad, const float* y,
                                                 const float* x, const float* mean, float* masked,
                                                 float* sums) {
  if (y) {
    if (g.block == 16) return backward_sums_of<Lanes, true>(g, grad, y, x, mean, masked, sums);
    if (g.block == 8) return backward_sums_of<Lanes8, true>(g, grad, y, x, mean, masked, sums);
    return backward_sums_of<float, true>(g, grad, y, x, mean, masked, sums);
  }
  if (g.block == 16) return backward_sums_of<Lanes, false>(g, grad, y, x, mean, masked, sums);
  if (g.block == 8) return backward_sums_of<Lanes8, false>(g, grad, y, x, mean, masked, sums);
  backward_sums_of<float, false>(g, grad, y, x, mean, masked, sums);
}

TOPKNOT_MULTIVERSION void bn_image_backward_apply(const ChannelGeometry& g, const float* grad, const float* x,
                                                  float* dx, const float* a, const float* b, const float* c) {
  if (g.block == 16) return backward_apply_of<Lanes>(g, grad, x, dx, a, b, c);
  if (g.block == 8) return backward_apply_of<Lanes8>(g, grad, x, dx, a, b, c);
  backward_apply_of<float>(g, grad, x, dx, a, b, c);
}

}  // namespace topknot
