#include "compress/lowrank/plan.h"
#include "nn/base/check.h"
#include "tests/compress/lowrank/lowrank_fixture.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// One matrix and rank 1 in double, where a basis is a normalised vector.
struct PlainAcpSgd {
  std::size_t rows, cols;
  std::vector<double> last;
  std::vector<std::vector<double>> residuals;
  std::vector<double> average;
  bool sends_p = true;

  void step(const std::vector<std::vector<float>>& gradients, const std::vector<double>& weights) {
    std::vector<double> basis = last;
    for (double& x : basis) x /= norm(last);
    last.assign(sends_p ? rows : cols, 0.0);
    const auto entry = [&](const std::vector<double>& other, std::size_t i, std::size_t j) {
      return sends_p ? other[i] * basis[j] : basis[i] * other[j];
    };
    for (std::size_t w = 0; w < gradients.size(); ++w) {
      std::vector<double> own(last.size());
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j) {
          double& m = residuals[w][i * cols + j];
          m += static_cast<double>(gradients[w][i * cols + j]);
          own[sends_p ? i : j] += m * basis[sends_p ? j : i];
        }
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j) residuals[w][i * cols + j] -= entry(own, i, j);
      for (std::size_t i = 0; i < own.size(); ++i)
        last[i] += weights[w] * own[i] / static_cast<double>(gradients.size());
    }
    average.assign(rows * cols, 0.0);
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < cols; ++j) average[i * cols + j] = entry(last, i, j);
    sends_p = !sends_p;
  }
};

}  // namespace

TEST_CASE("acpsgd alternates between P and Q as the paper does, in double, with uneven weights") {
  const std::size_t rows = 11, cols = 16;
  const GroupSpec spec = matrices({{rows, cols}}, 2);
  SimulatedRanks ranks(low_rank("acpsgd", 1), spec);
  PlainAcpSgd plain{rows, cols, {}, std::vector(2, std::vector<double>(rows * cols)), {}};
  const CounterRng start(5, RngUse::compress, 0, 0);
  for (std::size_t j = 0; j < cols; ++j) plain.last.push_back(static_cast<double>(start.normal(j)));
  for (std::uint32_t step = 0; step < 9; ++step) {
    std::vector<std::vector<float>> gradients;
    for (std::uint32_t r = 0; r < 2; ++r)
      gradients.push_back(ranks[r].gradient = normal_vector(step, r, spec.numel));
    REQUIRE(ranks.step(step, 1.0, {1.25f, 0.75f}));
    plain.step(gradients, {1.25, 0.75});
    CHECK(ranks[0].compressor->selected() == (step % 2 == 0 ? rows : cols));
    CHECK(distance(ranks[0].average, plain.average) < 1e-5 * norm(plain.average));
    for (std::size_t r = 0; r < 2; ++r)
      CHECK(distance(ranks[r].residual, plain.residuals[r]) < 1e-5 * norm(plain.residuals[r]));
  }
}

TEST_CASE("acpsgd refuses a state of another turn") {
  SimulatedRanks ranks(low_rank("acpsgd", 2), matrices({{24, 17}, {6, 1}}, 1));
  for (std::uint32_t step = 0; step < 2; ++step) {
    auto state = ranks[0].compressor->state();
    const std::byte turn = state[0];
    state[0] = std::byte{2};
    CHECK_THROWS_AS(ranks[0].compressor->load_state(state), Error);
    state[0] = turn ^ std::byte{1};  // a factor of the other's length
    CHECK_THROWS_AS(ranks[0].compressor->load_state(state), Error);
    state[0] = turn;
    ranks[0].compressor->load_state(state);
    REQUIRE(ranks.step(step, 1.0));
  }
}
