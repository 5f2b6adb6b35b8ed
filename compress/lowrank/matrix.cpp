#include "compress/lowrank/matrix.h"

#include <algorithm>
#include <cstring>

#include "nn/core/simd.h"

namespace topknot::lowrank {
namespace {

// Halves in a fixed order.
TOPKNOT_INLINE float sum_lanes(Lanes v) {
  float x[kLanes];
  std::memcpy(x, &v, sizeof x);
  for (std::size_t width = kLanes / 2; width > 0; width /= 2)
    for (std::size_t i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

TOPKNOT_INLINE Lanes load_some(const float* p, std::size_t count) {
  Lanes v = {};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

// Rows x Width dot products of length cols. The sum of one of them does not depend on Rows or Width.
template <int Rows, int Width>
TOPKNOT_INLINE void dots(const float* m, std::size_t cols, const float* q, float* p, std::size_t rank) {
  Lanes sums[Rows][Width] = {};
  std::size_t j = 0;
  for (; j + kLanes <= cols; j += kLanes)
    for (int k = 0; k < Width; ++k) {
      const Lanes factor = load(q + static_cast<std::size_t>(k) * cols + j);
      for (int i = 0; i < Rows; ++i) sums[i][k] += load(m + static_cast<std::size_t>(i) * cols + j) * factor;
    }
  if (j < cols)
    for (int k = 0; k < Width; ++k) {
      const Lanes factor = load_some(q + static_cast<std::size_t>(k) * cols + j, cols - j);
      for (int i = 0; i < Rows; ++i)
        sums[i][k] += load_some(m + static_cast<std::size_t>(i) * cols + j, cols - j) * factor;
    }
  for (int i = 0; i < Rows; ++i)
    for (int k = 0; k < Width; ++k)
      p[static_cast<std::size_t>(i) * rank + static_cast<std::size_t>(k)] = sum_lanes(sums[i][k]);
}

template <int Rows>
TOPKNOT_INLINE void row_dots(const float* m, std::size_t cols, const float* q, float* p, std::size_t rank) {
  std::size_t k = 0;
  for (; k + 4 <= rank; k += 4) dots<Rows, 4>(m, cols, q + k * cols, p + k, rank);
  for (; k < rank; ++k) dots<Rows, 1>(m, cols, q + k * cols, p + k, rank);
}

}  // namespace

TOPKNOT_MULTIVERSION void product(const float* m, std::size_t begin, std::size_t end, std::size_t cols,
                                  const float* q, std::size_t rank, float* p) {
  std::size_t i = begin;
  for (; i + 2 <= end; i += 2) row_dots<2>(m + i * cols, cols, q, p + i * rank, rank);
  for (; i < end; ++i) row_dots<1>(m + i * cols, cols, q, p + i * rank, rank);
}

TOPKNOT_MULTIVERSION void transposed_product(const float* m, std::size_t rows, std::size_t cols,
                                             std::size_t begin, std::size_t end, const float* p,
                                             std::size_t rank, float* q) {
  const std::size_t width = end - begin;
  for (std::size_t k = 0; k < rank; ++k) std::fill_n(q + k * cols + begin, width, 0.0f);
  std::size_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    const float* a = m + i * cols + begin;
    const float *b = a + cols, *c = b + cols, *d = c + cols;
    for (std::size_t k = 0; k < rank; ++k) {
      const float pa = p[i * rank + k], pb = p[(i + 1) * rank + k], pc = p[(i + 2) * rank + k],
                  pd = p[(i + 3) * rank + k];
      float* __restrict out = q + k * cols + begin;
      for (std::size_t j = 0; j < width; ++j) out[j] += (a[j] * pa + b[j] * pb) + (c[j] * pc + d[j] * pd);
    }
  }
  for (; i < rows; ++i) {
    const float* a = m + i * cols + begin;
    for (std::size_t k = 0; k < rank; ++k) {
      const float pa = p[i * rank + k];
      float* __restrict out = q + k * cols + begin;
      for (std::size_t j = 0; j < width; ++j) out[j] += a[j] * pa;
    }
  }
}

TOPKNOT_MULTIVERSION void rebuild(float* u, float* average, std::size_t begin, std::size_t end,
                                  std::size_t cols, std::size_t rank, Factors own, Factors mean) {
  // A row's piece is made in the first-level cache.
  constexpr std::size_t piece = 1024;
  float scratch[piece];
  const auto combine = [&](const Factors& from, std::size_t row, std::size_t column, std::size_t width)
      __attribute__((always_inline)) {
    std::fill_n(scratch, width, 0.0f);
    for (std::size_t k = 0; k < rank; ++k) {
      const float factor = from.p[row * rank + k];
      const float* q = from.q + k * cols + column;
      for (std::size_t j = 0; j < width; ++j) scratch[j] += factor * q[j];
    }
  };
  for (std::size_t i = begin; i < end; ++i)
    for (std::size_t column = 0; column < cols; column += piece) {
      const std::size_t width = std::min(piece, cols - column);
      if (own.p) {
        combine(own, i, column, width);
        float* __restrict out = u + i * cols + column;
        for (std::size_t j = 0; j < width; ++j) out[j] -= scratch[j];
      }
      combine(mean, i, column, width);
      std::memcpy(average + i * cols + column, scratch, width * sizeof(float));
    }
}

}  // namespace topknot::lowrank
