#include "tools/study/study_regression.h"

#include <cmath>
#include <limits>

#include "nn/core/rng.h"
#include "nn/core/simd.h"
#include "tools/study/study_ranks.h"

namespace topknot {
namespace {

constexpr double kLearningRate = 0.01;
constexpr double kCentreVariance = 5, kNoiseVariance = 0.5;

// out = matrix w - rhs for a symmetric n x n matrix: column by column, so that it vectorises over rows.
template <class T>
TOPKNOT_INLINE void gradient_of(const T* matrix, const T* rhs, const T* w, std::size_t n, T* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = -rhs[i];
  for (std::size_t j = 0; j < n; ++j)
    for (std::size_t i = 0; i < n; ++i) out[i] += matrix[j * n + i] * w[j];
}
TOPKNOT_MULTIVERSION
void gradient_at(const float* matrix, const float* rhs, const float* w, std::size_t n, float* out) {
  gradient_of(matrix, rhs, w, n, out);
}
TOPKNOT_MULTIVERSION
void gradient_at(const double* matrix, const double* rhs, const double* w, std::size_t n, double* out) {
  gradient_of(matrix, rhs, w, n, out);
}

// Solves a x = b for a symmetric positive definite a, n x n, by Cholesky's decomposition.
std::vector<double> solve(std::vector<double> a, std::vector<double> b) {
  const std::size_t n = b.size();
  for (std::size_t j = 0; j < n; ++j) {
    for (std::size_t k = 0; k < j; ++k)
      for (std::size_t i = j; i < n; ++i) a[i * n + j] -= a[i * n + k] * a[j * n + k];
    const double root = std::sqrt(a[j * n + j]);
    for (std::size_t i = j; i < n; ++i) a[i * n + j] /= root;
  }
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t k = 0; k < i; ++k) b[i] -= a[i * n + k] * b[k];
    b[i] /= a[i * n + i];
  }
  for (std::size_t i = n; i-- > 0;) {
    for (std::size_t k = i + 1; k < n; ++k) b[i] -= a[k * n + i] * b[k];
    b[i] /= a[i * n + i];
  }
  return b;
}

}  // namespace

RegressionProblem make_regression(std::uint64_t seed) {
  RegressionProblem problem;
  const std::size_t n = problem.dims;
  std::vector<double> matrix_sum(n * n), rhs_sum(n);
  for (int r = 0; r < problem.ranks; ++r) {
    const auto stream = static_cast<std::uint32_t>(r);
    const CounterRng entries(seed, RngUse::dataset, stream, 0), solution(seed, RngUse::dataset, stream, 1),
        noise(seed, RngUse::dataset, stream, 2);
    std::vector<double> t(n), row(n), matrix(n * n), rhs(n);
    const double centre = std::sqrt(kCentreVariance) * solution.normal(n);
    for (std::size_t j = 0; j < n; ++j) t[j] = centre + solution.normal(j);
    const double scale = 2.0 / static_cast<double>(problem.rows);
    for (std::size_t i = 0; i < problem.rows; ++i) {
      double y = std::sqrt(kNoiseVariance) * noise.normal(i);
      for (std::size_t j = 0; j < n; ++j) row[j] = entries.normal(i * n + j), y += row[j] * t[j];
      for (std::size_t j = 0; j < n; ++j) {
        rhs[j] += scale * row[j] * y;
        for (std::size_t k = 0; k < n; ++k) matrix[j * n + k] += scale * row[j] * row[k];
      }
    }
    for (std::size_t i = 0; i < n * n; ++i) matrix_sum[i] += matrix[i];
    for (std::size_t i = 0; i < n; ++i) rhs_sum[i] += rhs[i];
    problem.matrix.push_back(std::move(matrix));
    problem.rhs.push_back(std::move(rhs));
  }
  problem.optimum = solve(matrix_sum, rhs_sum);
  const CounterRng start(seed, RngUse::init);
  for (std::size_t j = 0; j < n; ++j)
    problem.start.push_back((2.0 * start.uniform(j) - 1.0) / std::sqrt(static_cast<double>(n)));
  return problem;
}

template <class T>
double regression_distance(const RegressionProblem& problem, const CompressOptions& options, double density,
                           int iterations) {
  std::vector<std::vector<T>> matrix, rhs;
  for (const auto& values : problem.matrix) matrix.emplace_back(values.begin(), values.end());
  for (const auto& values : problem.rhs) rhs.emplace_back(values.begin(), values.end());
  std::vector<T> w(problem.start.begin(), problem.start.end());
  StudyRanks<T> ranks(options, problem.dims, problem.ranks);
  for (int t = 0; t < iterations; ++t) {
    for (std::size_t r = 0; r < ranks.size(); ++r)
      gradient_at(matrix[r].data(), rhs[r].data(), w.data(), w.size(), ranks.gradient(r).data());
    const std::span<const T> average = ranks.step(density);
    for (std::size_t j = 0; j < w.size(); ++j) w[j] -= static_cast<T>(kLearningRate) * average[j];
    if (!std::isfinite(w[0])) return std::numeric_limits<double>::infinity();
  }
  double squares = 0;
  for (std::size_t j = 0; j < w.size(); ++j) {
    const double difference = static_cast<double>(w[j]) - problem.optimum[j];
    squares += difference * difference;
  }
  return std::log10(squares);
}

template double regression_distance<float>(const RegressionProblem&, const CompressOptions&, double, int);
template double regression_distance<double>(const RegressionProblem&, const CompressOptions&, double, int);

}  // namespace topknot
