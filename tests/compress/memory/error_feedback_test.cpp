// The whole way of a gradient through selection, memory, code and average: golden traces and invariants.
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "tests/compress/simulated_ranks.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// g_t,p[j] = ((3t + 5p + 7j) mod 11) - 5: ten times the gradients of the golden trace, integers so that the
// tie at t = 2 is exact.
std::vector<float> trace_gradient(int t, int p) {
  std::vector<float> g(4);
  for (int j = 0; j < 4; ++j)
    g[static_cast<std::size_t>(j)] = static_cast<float>((3 * t + 5 * p + 7 * j) % 11 - 5);
  return g;
}

struct Sent {
  std::uint32_t index;
  double value;
};
constexpr std::array<std::array<Sent, 2>, 4> kSent = {
    {{{{0, -5}, {1, -4}}}, {{{1, 7}, {0, 3}}}, {{{1, -3}, {3, 6}}}, {{{3, 5}, {0, -7}}}}};
// Weights of the golden trace; ten times the gradients at a tenth of lr = 0.1 give the same.
constexpr double kWeights[4][4] = {
    {1.025, 1.02, 1, 1}, {1.0325, 1.003, 1, 1}, {1.03925, 1.0027, 1, .97}, {1.080325, 1.00243, 1, .918}};
constexpr double kResiduals[2][4] = {{3, 0, -1, 0}, {0, 6, -3, -3}};

// SGD with momentum 0.9 on the average; the first buffer is the first gradient, which a buffer of zeros gives
// too.
void momentum_step(std::vector<double>& weights, std::vector<double>& momentum,
                   const std::vector<float>& average) {
  for (std::size_t j = 0; j < 4; ++j) {
    momentum[j] = 0.9 * momentum[j] + static_cast<double>(average[j]);
    weights[j] -= 0.01 * momentum[j];
  }
}

}  // namespace

TEST_CASE("two ranks of the topk compressor give the golden trace") {
  SimulatedRanks ranks(named("topk"), whole_group(4, 2));
  std::vector<double> weights(4, 1.0), momentum(4, 0.0);
  for (int t = 0; t < 4; ++t) {
    for (int p = 0; p < 2; ++p) ranks[static_cast<std::size_t>(p)].gradient = trace_gradient(t, p);
    REQUIRE(ranks.step(t, 0.25));
    for (std::size_t p = 0; p < 2; ++p) {
      CHECK(ranks[p].compressor->diagnostics().selected == 1);
      CHECK(ranks[p].compressor->diagnostics().threshold == std::abs(kSent[t][p].value));
    }
    const std::vector<float> average(ranks[0].average.begin(), ranks[0].average.end());
    momentum_step(weights, momentum, average);
    for (std::size_t j = 0; j < 4; ++j) CHECK(weights[j] == Approx(kWeights[t][j]).epsilon(1e-12));
  }
  for (std::size_t p = 0; p < 2; ++p)
    for (std::size_t j = 0; j < 4; ++j) CHECK(ranks[p].residual[j] == kResiduals[p][j]);
}

TEST_CASE("without a memory what is not sent is lost, and the residual memory is not needed") {
  const auto compressor = make_compressor(named("topk", {"memory=none"}), whole_group(4, 1));
  std::vector<float> gradient = {1, -4, 2, 3};
  StepContext info;
  info.density = 0.5;
  std::vector<std::vector<std::byte>> blocks = {compressor->encode({gradient, {}}, info).block};
  CHECK_FALSE(compressor->decode({.blocks = views_of(blocks)}));
  const auto average = compressor->commit({});
  CHECK(average.data() == gradient.data());
  CHECK(gradient == std::vector<float>{0, -4, 0, 3});
}

TEST_CASE("the (1 - k/d)^2 bound of Shi et al. holds for bell shapes and not for a constant magnitude") {
  const std::size_t d = 200000, k = 2000;
  const auto ratio = [&](std::vector<float> x) {
    const auto selector = make_selector("topk");
    Selection selected;
    SelectStep step;
    step.k = k;
    selector->select(x, {}, step, selected);
    double all = 0, kept = 0;
    for (const double v : x) all += v * v;
    for (const double v : selected.values) kept += v * v;
    return (all - kept) / all;
  };
  const CounterRng rng(31, RngUse::test);
  std::vector<float> normal(d), laplace(d), constant(d);
  for (std::size_t i = 0; i < d; ++i) {
    normal[i] = rng.normal(i);
    laplace[i] = static_cast<float>(-std::log(1.0 - rng.uniform(d + i)) * (i % 2 ? 1 : -1));
    constant[i] = i % 3 ? 0.7f : -0.7f;
  }
  const double bound = (1 - 0.01) * (1 - 0.01);
  CHECK(ratio(normal) == Approx(0.91624).margin(0.002));
  CHECK(ratio(laplace) == Approx(0.83610).margin(0.008));
  CHECK(ratio(normal) < bound);
  CHECK(ratio(laplace) < bound);
  CHECK(ratio(constant) == Approx(1 - 0.01).epsilon(1e-9));
  CHECK(ratio(constant) > bound);
}
