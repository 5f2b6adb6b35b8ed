#include "compress/lowrank/orthonormal.h"

#include <algorithm>
#include <cmath>

#include "nn/core/base/check.h"
#include "nn/core/simd.h"

namespace topknot::lowrank {
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
