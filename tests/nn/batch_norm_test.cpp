#include "tests/support/batch_norm_case.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;

namespace {

void check_setup(const BatchNormSetup& s, Layout layout, int threads = 1) {
  const Threads scope(threads);
  INFO(s.str() << (layout == Layout::blocked ? ", blocked" : ", plain"));
  const BatchNormCase c(s, DType::f32, 0);
  const Leaf x(s.shape(), c.x), gamma({s.channels}, c.gamma), beta({s.channels}, c.beta),
      residual(s.shape(), s.residual ? c.residual : c.x);
  Buffer mean{"mean", c.mean}, variance{"variance", c.variance};
  const Variable y = batch_norm(in_layout(x.variable(), layout), gamma.variable(), beta.variable(),
                                s.residual ? in_layout(residual.variable(), layout) : Variable(),
                                {&mean, &variance, c.momentum, c.epsilon}, {s.training, s.relu});
  CHECK(y.value().layout() == layout);
  const auto values = values_of(y);
  backward(weighted_sum(y, c.dy));
  check_formula(c,
                {values, x.gradient(), gamma.gradient(), beta.gradient(), residual.gradient(), mean.values,
                 variance.values},
                1);
}

}  // namespace

TEST_CASE("batch_norm agrees with the formula in every combination of its options") {
  for (const bool residual : {false, true})
    for (const bool relu : {false, true})
      for (const bool training : {false, true}) {
        check_setup({3, 5, 4, 3, residual, relu, training, 0.3f}, Layout::plain);
        check_setup({3, 32, 5, 3, residual, relu, training, 0.3f}, Layout::blocked);
      }
}

TEST_CASE("batch_norm agrees with the formula on odd shapes: one image, one pixel, many images") {
  for (const Layout layout : {Layout::plain, Layout::blocked}) {
    check_setup({1, 16, 7, 5, true, true, true, 0.0f}, layout);
    check_setup({9, 48, 1, 1, false, true, true, -0.5f}, layout);
    for (const int threads : {1, 2, 3}) check_setup({33, 16, 3, 2, true, false, true, 0.5f}, layout, threads);
    check_setup({2, 64, 13, 13, true, true, true, 0.0f}, layout);
    check_setup({1, 16, 1, 1, false, true, false, 0.0f}, layout);
  }
  check_setup({4, 1, 3, 3, false, false, true, 0.0f}, Layout::plain);
}

TEST_CASE("batch_norm of constant channels is beta, and its input gradient is finite") {
  Leaf x({2, 2, 2, 2}, std::vector<float>(16, 3.0f)), gamma({2}, {2, 2}), beta({2}, {0.5f, -0.5f});
  Buffer mean{"mean", std::vector<float>(2, 0.0f)}, variance{"variance", std::vector<float>(2, 1.0f)};
  const Variable y = batch_norm(x.variable(), gamma.variable(), beta.variable(), {}, {&mean, &variance}, {});
  for (std::size_t i = 0; i < 16; ++i)
    CHECK(values_of(y)[i] == Approx(i / 4 % 2 ? -0.5f : 0.5f).margin(1e-3));
  CHECK(mean.values[0] == Approx(0.3f));
  CHECK(variance.values[0] == Approx(0.9f));
  backward(weighted_sum(y, random_values(16, 1)));
  for (float d : x.gradient()) CHECK(std::isfinite(d));
}

TEST_CASE("batch_norm of inputs far from zero: no digits of the variance cancel") {
  const Shape shape{32, 16, 16, 16};
  const reference::Images images{32, 16, 256};
  const auto noise = random_values(shape.numel(), 1);
  for (const float far : {0.0f, -100.0f, 1000.0f, 10000.0f})
    for (const bool outlier : {false, true}) {  // first of its channel
      auto values = noise;
      for (float& v : values) v += far;
      if (outlier) values[0] += 50.0f, values[64 * 16] -= 50.0f;
      const Array v = as_double(values);
      const auto r =
          reference::batch_norm(images, v, v, Array(16, 1.0), Array(16, 0.0), {}, {}, {}, 1e-5, false, v);
      Array unbiased = r.variance, y_scale = absolute(r.y);
      for (double& scale : y_scale) scale += std::abs(far) + 8;
      for (double& u : unbiased) u *= images.count() / (images.count() - 1);
      for (const Layout layout : {Layout::plain, Layout::blocked})
        for (const int threads : {1, 3})
          for (const bool fused : {false, true}) {  // behind a convolution that copies its input
            const Threads scope(threads);
            INFO(far << (outlier ? " with outliers, " : ", ") << threads << " threads"
                     << (fused ? ", conv_bn" : ""));
            Buffer mean{"mean", std::vector<float>(16)}, variance{"variance", std::vector<float>(16)};
            Leaf gamma({16}, std::vector<float>(16, 1.0f)), beta({16}, std::vector<float>(16, 0.0f));
            const Variable x(to_layout(Tensor::from(values, shape), layout));
            Tensor copy = Tensor::zeros({16, 16, 1, 1});
            for (std::int64_t c = 0; c < 16; ++c) copy.data()[17 * c] = 1;
            const BatchNormState state{&mean, &variance, 1.0f};
            const Variable y = fused ? conv_bn(x, Variable(copy), gamma.variable(), beta.variable(), {},
                                               {16, 16, 1, 1, 0}, state, {})
                                     : batch_norm(x, gamma.variable(), beta.variable(), {}, state, {});
            check_close("variance", variance.values, unbiased, 2e-6);
            // y = scale x + shift in fp32 has two roundings of numbers as large as `far`.
            check_close("y", values_of(y), r.y, y_scale, 1.5e-7);
          }
    }
}

TEST_CASE("batch_norm rejects shapes that do not fit") {
  Leaf gamma({4}, {1, 1, 1, 1}), beta({4}, {0, 0, 0, 0}), three({3}, {1, 1, 1});
  Buffer mean{"mean", std::vector<float>(4)}, variance{"variance", std::vector<float>(4)};
  const BatchNormState state{&mean, &variance};
  const Variable x(Tensor::zeros({2, 4, 3, 3})), other(Tensor::zeros({2, 4, 3, 2}));
  CHECK_THROWS_AS(batch_norm(x, three.variable(), beta.variable(), {}, state, {}), Error);
  CHECK_THROWS_AS(batch_norm(x, gamma.variable(), three.variable(), {}, state, {}), Error);
  CHECK_THROWS_AS(batch_norm(x, gamma.variable(), beta.variable(), other, state, {}), Error);
  CHECK_THROWS_AS(
      batch_norm(Variable(Tensor::zeros({2, 4})), gamma.variable(), beta.variable(), {}, state, {}), Error);
}
