#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;
using reference::Conv;

namespace {

constexpr double kEpsilon = 1e-3f;

Layout output_layout(const ConvGeometry& geometry) {
  return kernels_for<ConvKernels>(Tensor::zeros({1})).output_layout(geometry);
}

struct Inputs {
  Conv g;
  Layout layout;
  Leaf x, w, gamma, beta, residual;
  std::vector<float> dy;
  Buffer running_mean, running_variance;
  std::vector<float>&mean = running_mean.values, &variance = running_variance.values;

  explicit Inputs(const Conv& conv)
      : g(conv),
        layout(g.in % channel_block() == 0 ? Layout::blocked : Layout::plain),
        x({g.n, g.in, g.height, g.width}, random_values(g.x_size(), 1)),
        w(g.geometry().weight_shape(), scaled(random_values(g.w_size(), 2))),
        gamma({g.out}, random_values(g.out, 3, 1)),
        beta({g.out}, random_values(g.out, 4)),
        residual({g.n, g.out, g.out_height(), g.out_width()}, random_values(g.y_size(), 5)),
        dy(random_values(g.y_size(), 6)),
        running_mean{"mean", random_values(g.out, 7)},
        running_variance{"variance", std::vector<float>(std::size_t(g.out), 1.5f)} {}

  std::vector<float> scaled(std::vector<float> v) const {  // outputs of about variance 1
    for (float& value : v) value /= std::sqrt(float(g.w_size() / g.out));
    return v;
  }
  ConvGeometry geometry() const { return g.geometry(); }
  BatchNormState state() { return {&running_mean, &running_variance, 0.1f, float(kEpsilon)}; }
};

void check_against_formulas(const Conv& g, bool with_residual, bool relu, bool training, int threads = 1) {
  const Threads scope(threads);
  INFO(g.str() << (with_residual ? ", residual" : "") << (relu ? ", relu" : "")
               << (training ? ", training, " : ", evaluation, ") << threads << " threads");
  Inputs in(g);
  const Array mean_before = as_double(in.mean), variance_before = as_double(in.variance);
  const Variable residual =
      with_residual ? in_layout(in.residual.variable(), output_layout(in.geometry())) : Variable();
  const Variable y = conv_bn(in_layout(in.x.variable(), in.layout), in.w.variable(), in.gamma.variable(),
                             in.beta.variable(), residual, in.geometry(), in.state(), {training, relu});
  backward(weighted_sum(y, in.dy));

  const Array x = as_double(values_of(in.x.variable())), w = as_double(values_of(in.w.variable())),
              ax = absolute(x), aw = absolute(w);
  const Array conv = reference::conv2d(g, x, w), conv_scale = reference::conv2d(g, ax, aw);
  const reference::Images images{g.n, g.out, g.out_height() * g.out_width()};
  const auto r = reference::batch_norm(images, conv, conv_scale, as_double(values_of(in.gamma.variable())),
                                       as_double(values_of(in.beta.variable())),
                                       with_residual ? as_double(values_of(in.residual.variable())) : Array(),
                                       training ? Array() : mean_before, training ? Array() : variance_before,
                                       kEpsilon, relu, as_double(in.dy));
  const double tolerance = 1e-5;
  check_close("y", values_of(y), r.y, r.y_scale, tolerance);
  check_close("dx", in.x.gradient(), conv2d_input_gradient(g, w, r.dx),
              conv2d_input_gradient(g, aw, r.dx_scale), tolerance);
  check_close("dw", in.w.gradient(), conv2d_weight_gradient(g, x, r.dx),
              conv2d_weight_gradient(g, ax, r.dx_scale), tolerance);
  check_close("dgamma", in.gamma.gradient(), r.dgamma, r.dgamma_scale, tolerance);
  check_close("dbeta", in.beta.gradient(), r.dbeta, r.dbeta_scale, tolerance);
  if (with_residual) check_close("dresidual", in.residual.gradient(), r.dresidual, 0);
  if (!training) {
    CHECK((as_double(in.mean) == mean_before));
    return;
  }
  for (std::size_t c = 0; c < in.mean.size(); ++c) {
    CHECK(in.mean[c] == Approx(0.9 * mean_before[c] + 0.1 * r.mean[c]).epsilon(1e-5).margin(1e-5));
    CHECK(in.variance[c] ==
          Approx(0.9 * variance_before[c] + 0.1 * r.variance[c] * images.count() / (images.count() - 1))
              .epsilon(1e-5));
  }
}

}  // namespace

TEST_CASE("conv_bn is the formula of the convolution, then that of batch norm") {
  for (const bool residual : {false, true})
    for (const bool relu : {false, true})
      for (const bool training : {true, false}) {
        check_against_formulas({3, 16, 6, 5, 16, 3, 1, 1}, residual, relu, training);
        check_against_formulas({2, 3, 7, 9, 6, 3, 1, 1}, residual, relu, training);
      }
}

TEST_CASE("conv_bn agrees with the formulas for the shapes of real networks") {
  check_against_formulas({2, 3, 9, 8, 16, 3, 1, 1}, false, true, true);     // stem
  check_against_formulas({2, 16, 7, 7, 32, 3, 2, 1}, false, true, true);    // first of a stage
  check_against_formulas({2, 64, 5, 7, 128, 1, 2, 0}, false, false, true);  // projection
  check_against_formulas({3, 64, 4, 4, 64, 3, 1, 1}, true, true, true);
  check_against_formulas({2, 128, 4, 5, 128, 3, 1, 1}, true, true, true);
  check_against_formulas({2, 128, 13, 13, 128, 1, 1, 0}, true, true, true);  // worked as a whole batch
  check_against_formulas({4, 256, 2, 2, 256, 3, 1, 1}, false, true, true);
  check_against_formulas({1, 48, 5, 5, 48, 3, 1, 1}, true, true, true);
  check_against_formulas({3, 96, 5, 6, 96, 3, 2, 1, 96}, false, false, true);  // depthwise
  check_against_formulas({3, 96, 5, 6, 24, 1, 1, 0}, true, false, true);  // to a bottleneck of odd blocks
  check_against_formulas({3, 24, 5, 6, 96, 1, 1, 0}, false, true, true);
}

TEST_CASE("conv_bn works through batches that are cut unevenly over chunks and threads") {
  for (const int threads : {1, 2, 3}) {
    check_against_formulas({7, 16, 9, 9, 16, 3, 1, 1}, true, true, true, threads);
    check_against_formulas({5, 128, 3, 3, 128, 3, 2, 1}, true, true, true, threads);
  }
  check_against_formulas({15, 3, 32, 32, 16, 3, 1, 1}, false, true, true);
  check_against_formulas({17, 16, 32, 32, 16, 3, 1, 1}, false, true, true, 2);
}

TEST_CASE("conv_bn gives the values of conv2d followed by batch_norm, and the same gradients") {
  Inputs fused({6, 32, 8, 8, 32, 3, 1, 1}), apart(fused.g);
  const BatchNormOptions options{true, true};
  const Variable y =
      conv_bn(in_layout(fused.x.variable(), fused.layout), fused.w.variable(), fused.gamma.variable(),
              fused.beta.variable(), in_layout(fused.residual.variable(), output_layout(fused.geometry())),
              fused.geometry(), fused.state(), options);
  const Variable raw =
      conv2d(in_layout(apart.x.variable(), apart.layout), apart.w.variable(), {}, apart.geometry());
  const Variable z =
      batch_norm(raw, apart.gamma.variable(), apart.beta.variable(),
                 in_layout(apart.residual.variable(), raw.value().layout()), apart.state(), options);
  CHECK((values_of(y) == values_of(z)));
  CHECK((fused.mean == apart.mean));
  CHECK((fused.variance == apart.variance));
  backward(weighted_sum(y, fused.dy));
  backward(weighted_sum(z, apart.dy));
  CHECK((fused.gamma.gradient() == apart.gamma.gradient()));
  CHECK((fused.beta.gradient() == apart.beta.gradient()));
  CHECK((fused.residual.gradient() == apart.residual.gradient()));
  CHECK((fused.x.gradient() == apart.x.gradient()));
  CHECK((fused.w.gradient() == apart.w.gradient()));
}

TEST_CASE("conv_bn adds a residual in another layout correctly, or rejects it") {
  Inputs in({2, 16, 5, 5, 16, 3, 1, 1});
  const auto run = [&](Layout layout) {
    return values_of(conv_bn(in_layout(in.x.variable(), in.layout), in.w.variable(), in.gamma.variable(),
                             in.beta.variable(), in_layout(in.residual.variable(), layout), in.geometry(),
                             in.state(), {}));
  };
  const Layout layout = output_layout(in.geometry());
  const auto expected = run(layout);
  std::vector<float> actual = expected;
  try {
    actual = run(layout == Layout::blocked ? Layout::plain : Layout::blocked);
  } catch (const Error&) {
  }
  CHECK((actual == expected));
}

TEST_CASE("conv_bn rejects a weight of another shape") {
  Inputs in({2, 16, 5, 5, 16, 3, 1, 1});
  const Variable weight(Tensor::zeros({16, 16, 1, 1}));
  CHECK_THROWS_AS(conv_bn(in_layout(in.x.variable(), in.layout), weight, in.gamma.variable(),
                          in.beta.variable(), {}, in.geometry(), in.state(), {}),
                  Error);
}
