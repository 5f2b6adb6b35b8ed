#pragma once
// The sum over ranks whose bits do not depend on the backend: for every element ((g0 + g1) + g2) + ..., rank
// by rank. Any split of the range over threads, ranks or blocks gives the same bits.

#include <algorithm>
#include <cstddef>
#include <span>

#include "nn/core/bfloat16.h"

namespace topknot {

// out[i] = sources[0][i] + sources[1][i] + ... for i < count, in that order. `out` may be one of the sources.
template <class T>
void ordered_sum(std::span<const T* const> sources, T* out, std::size_t count) {
  constexpr std::size_t block = 2048;  // partial sums stay in the first-level cache
  T sum[block];
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t n = std::min(block, count - begin);
    std::copy_n(sources[0] + begin, n, sum);
    for (std::size_t r = 1; r < sources.size(); ++r) {
      const T* source = sources[r] + begin;
      for (std::size_t i = 0; i < n; ++i) sum[i] += source[i];
    }
    std::copy_n(sum, n, out + begin);
  }
}

// The sum in floats, rounded once.
inline void ordered_sum(std::span<const BFloat16* const> sources, BFloat16* out, std::size_t count) {
  constexpr std::size_t block = 2048;
  float sum[block], addend[block];
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t n = std::min(block, count - begin);
    to_float(sources[0] + begin, n, sum);
    for (std::size_t r = 1; r < sources.size(); ++r) {
      to_float(sources[r] + begin, n, addend);
      for (std::size_t i = 0; i < n; ++i) sum[i] += addend[i];
    }
    to_bfloat16(sum, n, out + begin);
  }
}

// Range `index` of `parts` of a range of `count` elements, cut at multiples of 16 elements.
struct ElementRange {
  std::size_t begin = 0, end = 0;
  std::size_t size() const { return end - begin; }
};
inline ElementRange slice_of(std::size_t count, int parts, int index) {
  const std::size_t blocks = (count + 15) / 16;
  const std::size_t per = blocks / parts, extra = blocks % parts;
  const auto start = [&](std::size_t i) { return std::min(count, 16 * (i * per + std::min(i, extra))); };
  return {start(index), start(index + 1)};
}

}  // namespace topknot
