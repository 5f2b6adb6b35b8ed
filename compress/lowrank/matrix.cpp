#include "compress/lowrank/matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "nn/base/check.h"
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

namespace {

TOPKNOT_MULTIVERSION double dot(const double* a, const double* b, std::size_t n) {
  constexpr std::size_t lanes = 8;
  double sums[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (std::size_t l = 0; l < lanes; ++l) sums[l] += a[i + l] * b[i + l];
  for (std::size_t l = 0; i < n; ++i, ++l) sums[l] += a[i] * b[i];
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

TOPKNOT_MULTIVERSION void subtract(double* a, const double* b, double factor, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] -= factor * b[i];
}

// Far below the rounding of float input: only exact combinations leave so little.
constexpr double kDependent = 1e-13;

}  // namespace

void orthonormalise(float* a, std::size_t n, std::size_t rank, std::size_t row_stride,
                    std::size_t column_stride, const CounterRng& fill, std::vector<double>& scratch) {
  TOPKNOT_CHECK(rank <= n, "more orthonormal columns than rows");
  // Columns of A turn into reflections in place, then the basis is made behind them.
  scratch.resize(2 * n * rank + 2 * rank);
  double *reflections = scratch.data(), *basis = reflections + n * rank, *tau = basis + n * rank,
         *sign = tau + rank;
  for (std::size_t k = 0; k < rank; ++k)
    for (std::size_t i = 0; i < n; ++i)
      reflections[k * n + i] = static_cast<double>(a[i * row_stride + k * column_stride]);
  for (std::size_t k = 0; k < rank; ++k) {
    double* v = reflections + k * n + k;
    const std::size_t length = n - k;
    const double whole = dot(reflections + k * n, reflections + k * n, n);
    double square = dot(v, v, length);
    if (square <= kDependent * kDependent * whole) {
      // A Gaussian vector is as random after the reflections so far as before them.
      for (std::size_t i = 0; i < length; ++i)
        v[i] = static_cast<double>(fill.normal(static_cast<std::uint64_t>(k) * n + i));
      square = dot(v, v, length);
    }
    const double norm = std::sqrt(square);
    sign[k] = v[0] < 0 ? 1.0 : -1.0;  // of R's diagonal: the one that does not cancel in v[0]
    v[0] -= sign[k] * norm;
    tau[k] = 2.0 / dot(v, v, length);
    for (std::size_t c = k + 1; c < rank; ++c) {
      double* column = reflections + c * n + k;
      subtract(column, v, tau[k] * dot(v, column, length), length);
    }
  }
  std::fill_n(basis, n * rank, 0.0);
  for (std::size_t k = rank; k-- > 0;) {
    basis[k * n + k] = 1.0;
    const double* v = reflections + k * n + k;
    for (std::size_t c = k; c < rank; ++c) {
      double* column = basis + c * n + k;
      subtract(column, v, tau[k] * dot(v, column, n - k), n - k);
    }
  }
  for (std::size_t k = 0; k < rank; ++k)
    for (std::size_t i = 0; i < n; ++i)
      a[i * row_stride + k * column_stride] = static_cast<float>(sign[k] * basis[k * n + i]);
}

}  // namespace topknot::lowrank
