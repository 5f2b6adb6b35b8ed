#include "nn/base/check.h"
#include "tests/compress/lowrank/lowrank_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// Algorithm 1 in double, for one matrix and weighted ranks: Gram-Schmidt, Q by columns.
struct PlainPowerSgd {
  std::size_t rows, cols, rank;
  std::vector<double> q;                       // [cols, rank]
  std::vector<std::vector<double>> residuals;  // by rank
  std::vector<double> average;

  void step(const std::vector<std::vector<float>>& gradients, const std::vector<double>& weights) {
    const double ranks = static_cast<double>(gradients.size());
    std::vector<double> p(rows * rank), mean_q(cols * rank);
    for (std::size_t w = 0; w < gradients.size(); ++w)
      for (std::size_t i = 0; i < rows * cols; ++i)
        residuals[w][i] += static_cast<double>(gradients[w][i]);  // M
    for (std::size_t w = 0; w < gradients.size(); ++w)
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j)
          for (std::size_t k = 0; k < rank; ++k)
            p[i * rank + k] += weights[w] * residuals[w][i * cols + j] * q[j * rank + k] / ranks;
    for (std::size_t k = 0; k < rank; ++k) {
      for (std::size_t before = 0; before <= k; ++before) {
        double dot = 0;
        for (std::size_t i = 0; i < rows; ++i) dot += p[i * rank + k] * p[i * rank + before];
        for (std::size_t i = 0; i < rows; ++i)
          p[i * rank + k] =
              before == k ? p[i * rank + k] / std::sqrt(dot) : p[i * rank + k] - dot * p[i * rank + before];
      }
    }
    for (std::size_t w = 0; w < gradients.size(); ++w) {
      std::vector<double> own(cols * rank);
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j)
          for (std::size_t k = 0; k < rank; ++k)
            own[j * rank + k] += residuals[w][i * cols + j] * p[i * rank + k];
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j)
          for (std::size_t k = 0; k < rank; ++k)
            residuals[w][i * cols + j] -= p[i * rank + k] * own[j * rank + k];
      for (std::size_t i = 0; i < own.size(); ++i) mean_q[i] += weights[w] * own[i] / ranks;
    }
    average.assign(rows * cols, 0.0);
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < cols; ++j)
        for (std::size_t k = 0; k < rank; ++k)
          average[i * cols + j] += p[i * rank + k] * mean_q[j * rank + k];
    q = mean_q;
  }
};

}  // namespace

TEST_CASE("powersgd follows algorithm 1 and 2 in double, with uneven weights") {
  const std::size_t rows = 14, cols = 19, rank = 3;
  const GroupSpec spec = matrices({{rows, cols}}, 3);
  SimulatedRanks ranks(low_rank("powersgd", 3), spec);
  PlainPowerSgd plain{rows, cols, rank, {}, std::vector(3, std::vector<double>(rows * cols)), {}};
  const CounterRng start(5, RngUse::compress, 0, 0);
  for (std::size_t j = 0; j < cols; ++j)
    for (std::size_t k = 0; k < rank; ++k) plain.q.push_back(static_cast<double>(start.normal(k * cols + j)));
  for (std::uint32_t step = 0; step < 8; ++step) {
    std::vector<std::vector<float>> gradients;
    for (std::uint32_t r = 0; r < 3; ++r)
      gradients.push_back(ranks[r].gradient = normal_vector(step, r, spec.numel));
    REQUIRE(ranks.step(step, 1.0, {0.5f, 1.75f, 0.75f}));
    plain.step(gradients, {0.5, 1.75, 0.75});
    CHECK(distance(ranks[0].average, plain.average) < 1e-5 * norm(plain.average));
    for (std::size_t r = 0; r < 3; ++r)
      CHECK(distance(ranks[r].residual, plain.residuals[r]) < 1e-5 * norm(plain.residuals[r]));
  }
}

TEST_CASE("powersgd refuses another's state") {
  const GroupSpec spec = matrices({{24, 17}, {6, 1}}, 1);
  const auto compressor = make_compressor(low_rank("powersgd", 2), spec);
  auto state = compressor->state();
  CHECK_THROWS_AS(make_compressor(low_rank("powersgd", 3), spec)->load_state(state), Error);
  state.pop_back();
  CHECK_THROWS_AS(compressor->load_state(state), Error);
}
