#pragma once
// Matrices and plain products, in double, that the low-rank methods are compared with.

#include "tests/compress/simulated_ranks.h"

namespace topknot::testing {

inline std::vector<float> normal_vector(std::uint32_t a, std::uint32_t b, std::size_t n) {
  const CounterRng rng(83, RngUse::test, a, b);
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = rng.normal(i);
  return x;
}

// A group of matrices and vectors, in this order.
inline GroupSpec matrices(const std::vector<std::pair<std::size_t, std::size_t>>& shapes, int ranks) {
  GroupSpec spec;
  spec.ranks = ranks;
  for (const auto& [rows, cols] : shapes) {
    spec.tensors.push_back({spec.numel, rows, cols});
    spec.numel += rows * cols;
  }
  if (spec.numel > 0) spec.segments = {{0, spec.numel}};
  return spec;
}

// Every matrix is approximated, however little that saves.
inline CompressOptions low_rank(const std::string& name, int rank) {
  return named(name, {"rank=" + std::to_string(rank), "min_compression=0", "seed=5"});
}

// A [rows, cols] matrix with the given singular values: the cosine basis on both sides.
inline std::vector<float> with_singular_values(std::size_t rows, std::size_t cols,
                                               const std::vector<double>& values) {
  const auto basis = [](std::size_t n, std::size_t k, std::size_t i) {
    const double angle = 3.14159265358979323846 * (double(i) + 0.5) * double(k);
    return std::cos(angle / double(n)) * std::sqrt((k == 0 ? 1.0 : 2.0) / double(n));
  };
  std::vector<float> m(rows * cols);
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < cols; ++j) {
      double x = 0;
      for (std::size_t k = 0; k < values.size(); ++k) x += values[k] * basis(rows, k, i) * basis(cols, k, j);
      m[i * cols + j] = float(x);
    }
  return m;
}

template <class A, class B>
double distance(const A& a, const B& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = double(a[i]) - double(b[i]);
    sum += d * d;
  }
  return std::sqrt(sum);
}
template <class A>
double norm(const A& a) {
  return distance(a, std::vector<double>(a.size()));
}

}  // namespace topknot::testing
