// compress.lr_inside: what is accumulated is learning rate times gradient (LAGS-SGD, arXiv 1911.08727,
// algorithm 1), so what waits in the residual keeps the rate of its own step.
#include <array>

#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

using Step = std::array<float, 2>;

// What one rank applies to two weights, of which one is sent in each step; the values are exact.
std::vector<Step> applied(bool lr_inside, const std::vector<Step>& gradients,
                          const std::vector<float>& rates) {
  CompressOptions options = named("lags");
  options.lr_inside = lr_inside;
  SimulatedRanks ranks(options, whole_group(2, 1));
  CHECK(ranks[0].compressor->applied() == (lr_inside ? Applied::learning_rate : Applied::nothing));
  std::vector<Step> result;
  for (std::size_t t = 0; t < gradients.size(); ++t) {
    ranks[0].gradient.assign(gradients[t].begin(), gradients[t].end());
    REQUIRE(ranks.step(static_cast<std::int64_t>(t), 0.5, {}, true, rates[t]));
    const float rate = lr_inside ? 1.0f : rates[t];
    result.push_back({rate * ranks[0].average[0], rate * ranks[0].average[1]});
  }
  return result;
}

using Steps = std::vector<Step>;
const Steps kGradients = {{3, 2}, {0, 1}, {1, 0}};

}  // namespace

TEST_CASE("the residual keeps the learning rate of the step it comes from") {
  // a1 = 0.5 (3, 2) = (1.5, 1): 1.5 is sent, 1 stays. a2 = (0, 1) + 0.25 (0, 1) = (0, 1.25).
  // a3 = 0.125 (1, 0).
  CHECK(applied(true, kGradients, {0.5f, 0.25f, 0.125f}) == Steps{{1.5f, 0}, {0, 1.25f}, {0.125f, 0}});
  // With the rate outside, u2 = (0, 2) + (0, 1) and all of it takes the second step's rate.
  CHECK(applied(false, kGradients, {0.5f, 0.25f, 0.125f}) == Steps{{1.5f, 0}, {0, 0.75f}, {0.125f, 0}});
}

TEST_CASE("under a constant learning rate it makes no difference where the rate is applied") {
  CHECK(applied(true, kGradients, {0.5f, 0.5f, 0.5f}) == applied(false, kGradients, {0.5f, 0.5f, 0.5f}));
}
