#include "nn/ops/kernels.h"

#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;

namespace {

struct Setup {
  std::int64_t n, channels, height, width;
  bool residual, relu, training;
  Layout layout;
  float mean;  // of the input
};

void check_setup(const Setup& s, int threads = 1) {
  const Threads scope(threads);
  INFO(s.n << "x" << s.channels << "x" << s.height << "x" << s.width << (s.residual ? ", residual" : "")
           << (s.relu ? ", relu" : "") << (s.training ? ", training" : ", evaluation")
           << (s.layout == Layout::blocked ? ", blocked" : ", plain"));
  const Shape shape{s.n, s.channels, s.height, s.width};
  const reference::Images images{s.n, s.channels, s.height * s.width};
  const auto size = static_cast<std::size_t>(s.channels);
  Leaf x(shape, random_values(shape.numel(), 1, s.mean)),
      gamma({s.channels}, random_values(s.channels, 2, 1)), beta({s.channels}, random_values(s.channels, 3)),
      residual(shape, random_values(shape.numel(), 4));
  const auto dy = random_values(shape.numel(), 5);
  Buffer running_mean{"mean", random_values(s.channels, 6, s.mean)},
      running_variance{"variance", std::vector<float>(size)};
  std::vector<float>&mean = running_mean.values, &variance = running_variance.values;
  for (std::size_t c = 0; c < size; ++c) variance[c] = 0.5f + 0.1f * static_cast<float>(c % 7);
  const auto mean_before = mean, variance_before = variance;
  const BatchNormState state{&running_mean, &running_variance, 0.3f, 1e-3f};

  const Variable y = batch_norm(in_layout(x.variable(), s.layout), gamma.variable(), beta.variable(),
                                s.residual ? in_layout(residual.variable(), s.layout) : Variable(), state,
                                {s.training, s.relu});
  CHECK(y.value().layout() == s.layout);
  const auto actual = values_of(y);
  backward(weighted_sum(y, dy));

  const Array rx = as_double(values_of(x.variable()));
  const auto r = reference::batch_norm(
      images, rx, absolute(rx), as_double(values_of(gamma.variable())), as_double(values_of(beta.variable())),
      s.residual ? as_double(values_of(residual.variable())) : Array(),
      s.training ? Array() : as_double(mean_before), s.training ? Array() : as_double(variance_before),
      static_cast<double>(1e-3f), s.relu, as_double(dy));
  check_close("y", actual, r.y, r.y_scale, 2e-6);
  check_close("dx", x.gradient(), r.dx, r.dx_scale, 2e-6);
  check_close("dgamma", gamma.gradient(), r.dgamma, r.dgamma_scale, 2e-6);
  check_close("dbeta", beta.gradient(), r.dbeta, r.dbeta_scale, 2e-6);
  if (s.residual) check_close("dresidual", residual.gradient(), r.dresidual, 0);

  if (!s.training) {
    CHECK((mean == mean_before));
    CHECK((variance == variance_before));
    return;
  }
  Array new_mean(size), new_variance(size);
  for (std::size_t c = 0; c < size; ++c) {
    new_mean[c] = 0.7 * mean_before[c] + 0.3 * r.mean[c];
    new_variance[c] = 0.7 * variance_before[c] + 0.3 * r.variance[c] * images.count() / (images.count() - 1);
  }
  Array mean_scale = absolute(new_mean);
  for (double& v : mean_scale) v += 1;
  check_close("running mean", mean, new_mean, mean_scale, 1e-6);
  check_close("running variance", variance, new_variance, 5e-6);
}

}  // namespace

TEST_CASE("batch_norm agrees with the formula in every combination of its options") {
  for (const bool residual : {false, true})
    for (const bool relu : {false, true})
      for (const bool training : {false, true}) {
        check_setup({3, 5, 4, 3, residual, relu, training, Layout::plain, 0.3f});
        check_setup({3, 32, 5, 3, residual, relu, training, Layout::blocked, 0.3f});
      }
}

TEST_CASE("batch_norm agrees with the formula on odd shapes: one image, one pixel, many images") {
  for (const Layout layout : {Layout::plain, Layout::blocked}) {
    check_setup({1, 16, 7, 5, true, true, true, layout, 0.0f});
    check_setup({9, 48, 1, 1, false, true, true, layout, -0.5f});
    for (const int threads : {1, 2, 3}) check_setup({33, 16, 3, 2, true, false, true, layout, 0.5f}, threads);
    check_setup({2, 64, 13, 13, true, true, true, layout, 0.0f});
    check_setup({1, 16, 1, 1, false, true, false, layout, 0.0f});
  }
  check_setup({4, 1, 3, 3, false, false, true, Layout::plain, 0.0f});
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
