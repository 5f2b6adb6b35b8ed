#pragma once
// Parts of a row's softmax, exp(z - top) / sum, by vector loops, for the losses on a CPU. For functions under
// TOPKNOT_MULTIVERSION. Sums are in an order that the row's length alone decides.

#include <algorithm>
#include <cstddef>

#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"

namespace topknot {

// The greatest of n elements, n > 0. A NaN may be passed over: it comes through by sum_of_exp().
template <class T>
TOPKNOT_INLINE float greatest_of(const T* z, std::size_t n) {
  float tops[kLanes];
  Lanes top = splat(widened(z[0]));
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes v = load_as<Lanes>(z + i);
    top = v > top ? v : top;
  }
  store(tops, top);
  float greatest = tops[0];
  for (const float t : tops) greatest = t > greatest ? t : greatest;
  for (; i < n; ++i) greatest = widened(z[i]) > greatest ? widened(z[i]) : greatest;
  return greatest;
}

// sum_i exp(z[i] - top)
template <class T>
TOPKNOT_INLINE double sum_of_exp(const T* z, std::size_t n, float top) {
  constexpr std::size_t kPiece = 32 * kLanes;  // summed in floats; pieces are added in double
  float sums[kLanes];
  double sum = 0;
  for (std::size_t begin = 0; begin < n; begin += kPiece) {
    const std::size_t end = std::min(n, begin + kPiece);
    Lanes piece{};
    std::size_t i = begin;
    for (; i + kLanes <= end; i += kLanes) piece += exp_lanes(load_as<Lanes>(z + i) - top);
    store(sums, piece);
    for (const float s : sums) sum += s;
    if (i == end) continue;
    store(sums, exp_lanes(load_part(z + i, end - i) - top));
    for (std::size_t j = 0; j < end - i; ++j) sum += sums[j];
  }
  return sum;
}

}  // namespace topknot
