// compress.lr_inside: what is accumulated is learning rate times gradient (LAGS-SGD, arXiv 1911.08727,
// algorithm 1), so what waits in the residual keeps the rate of its own step.
#include <array>

#include "compress/sparse_step.h"
#include "tests/support/catch.h"

using namespace topknot;

namespace {

// What one rank applies to two weights, of which one is sent in each step; the values are exact.
std::vector<std::array<double, 2>> applied(bool lr_inside,
                                           const std::vector<std::array<double, 2>>& gradients,
                                           const std::vector<double>& rates) {
  CompressOptions options;
  options.name = "lags";
  options.lr_inside = lr_inside;
  GroupSpec group;
  group.numel = 2;
  group.segments = {{0, 2}};
  SparseStep<double> step(sparse_presets().find("lags"), options, group);
  CHECK(step.form() == (lr_inside ? GradientForm::has_lr : GradientForm::plain));
  std::array<double, 2> memory[2] = {};
  int side = 0;
  std::vector<std::array<double, 2>> result;
  for (std::size_t t = 0; t < gradients.size(); ++t) {
    memory[side] = gradients[t];
    StepInfo info;
    info.step = static_cast<std::int64_t>(t);
    info.density = 0.5;
    info.lr = rates[t];
    const std::vector<Entries<double>> received{step.encode(memory[side], memory[1 - side], info)};
    const std::span<double> average = step.commit(received, Outcome{});
    const double rate = lr_inside ? 1.0 : rates[t];
    result.push_back({rate * average[0], rate * average[1]});
    if (average.data() == memory[1 - side].data()) side = 1 - side;
  }
  return result;
}

using Steps = std::vector<std::array<double, 2>>;
const Steps kGradients = {{3, 2}, {0, 1}, {1, 0}};

}  // namespace

TEST_CASE("the residual keeps the learning rate of the step it comes from") {
  // a1 = 0.5 (3, 2) = (1.5, 1): 1.5 is sent, 1 stays. a2 = (0, 1) + 0.25 (0, 1) = (0, 1.25).
  // a3 = 0.125 (1, 0).
  CHECK(applied(true, kGradients, {0.5, 0.25, 0.125}) == Steps{{1.5, 0}, {0, 1.25}, {0.125, 0}});
  // With the rate outside, u2 = (0, 2) + (0, 1) and all of it takes the second step's rate.
  CHECK(applied(false, kGradients, {0.5, 0.25, 0.125}) == Steps{{1.5, 0}, {0, 0.75}, {0.125, 0}});
}

TEST_CASE("under a constant learning rate it makes no difference where the rate is applied") {
  CHECK(applied(true, kGradients, {0.5, 0.5, 0.5}) == applied(false, kGradients, {0.5, 0.5, 0.5}));
}
