#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;

namespace {

void check_pool(const PoolGeometry& geometry, const Shape& shape, Layout layout,
                std::vector<float> values = {}) {
  const Threads scope(1);
  INFO((geometry.kind == PoolKind::max ? "max" : "average")
       << " window " << geometry.window << ", stride " << geometry.stride << ", padding " << geometry.padding
       << " on " << shape.str() << (layout == Layout::blocked ? ", blocked" : ""));
  // By default numbers of an open order: of equal ones cuDNN does not say which takes the gradient.
  for (std::size_t i = values.size(); i < std::size_t(shape.numel()); ++i)
    values.push_back(float((i * 37 + 11) % 251) / 64.0f - 2.0f);
  Leaf x(shape, values);
  const Variable y = pool(activation(x.variable(), layout), geometry);
  const Shape out{shape[0], shape[1], geometry.output_size(shape[2]), geometry.output_size(shape[3])};
  REQUIRE(y.shape() == out);
  CHECK(y.value().layout() == layout);
  const auto dy = random_activations(out.numel(), 2);
  backward(weighted_sum(y, dy));

  const reference::Pool r{
      shape[0] * shape[1],           shape[2], shape[3], geometry.window, geometry.stride, geometry.padding,
      geometry.kind == PoolKind::max};
  Array ry, rdx, scale, dx_scale;
  r.run(as_double(values), as_double(dy), ry, rdx);
  const bool max = geometry.kind == PoolKind::max;
  // Sums of up to nine numbers of about one.
  const double terms = activation_type() == DType::bf16 ? 9 : 4;
  check_close("y", values_of(y), ry, Array(ry.size(), max ? 0 : 4.0), rounding(1e-6));
  check_close("dx", x.gradient(), rdx,
              Array(rdx.size(), max && geometry.window <= geometry.stride ? 0 : terms), rounding(1e-6));
}

}  // namespace

TEST_CASE("pooling agrees with the formula: windows, strides, padding, odd sizes, layouts") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const PoolKind kind : {PoolKind::max, PoolKind::average})
    for (const Layout layout : layouts(channel_block())) {
      // On a GPU cuDNN may take other kernels for whole vectors of channels.
      for (const std::int64_t channels : layout == Layout::blocked ? std::vector<std::int64_t>{32}
                                         : on_gpu()                ? std::vector<std::int64_t>{1, 5, 8}
                                                                   : std::vector<std::int64_t>{5}) {
        check_pool({kind, 2, 2, 0}, {2, channels, 8, 6}, layout);
        check_pool({kind, 2, 2, 0}, {3, channels, 7, 9}, layout);  // the last row and column are left out
        check_pool({kind, 3, 2, 0}, {1, channels, 9, 8}, layout);
        check_pool({kind, 3, 2, 1}, {2, channels, 9, 8}, layout);
        check_pool({kind, 3, 1, 1}, {2, channels, 5, 7}, layout);
        check_pool({kind, 2, 1, 0}, {2, channels, 4, 5}, layout);
        check_pool({kind, 2, 3, 0}, {2, channels, 8, 10}, layout);  // gaps between the windows
        check_pool({kind, 2, 2, 1}, {1, channels, 5, 5}, layout);
        check_pool({kind, 2, 2, 0}, {1, channels, 2, 2}, layout);
        check_pool({kind, 3, 3, 2}, {1, channels, 4, 4}, layout);
      }
    }
}

TEST_CASE("max pooling: padding never wins, and of equal values the first takes the gradient") {
  for (const Layout layout : {Layout::plain, Layout::blocked}) {
    const Shape shape{2, 16, 6, 5};
    check_pool({PoolKind::max, 3, 2, 1}, shape, layout, random_values(shape.numel(), 3, -100.0f));
    check_pool({PoolKind::max, 2, 2, 0}, shape, layout, std::vector<float>(shape.numel(), 0.0f));
    check_pool({PoolKind::max, 3, 2, 1}, shape, layout, std::vector<float>(shape.numel(), -1.0f));
    auto rounded = random_values(shape.numel(), 4);
    for (float& v : rounded) v = v > 0 ? std::round(v) : 0;  // as after ReLU: many zeros
    check_pool({PoolKind::max, 2, 2, 0}, shape, layout, rounded);
    check_pool({PoolKind::max, 3, 1, 1}, shape, layout, rounded);
  }
}

TEST_CASE("pooling: one layer takes inputs of different sizes and layouts in turn") {
  const PoolGeometry geometry{PoolKind::average, 2, 2, 0};
  for (int round = 0; round < 2; ++round)
    for (const Layout layout : {Layout::blocked, Layout::plain})
      for (const std::int64_t size : {4, 6}) {
        const Variable x(Tensor::from(std::vector<float>(2 * 16 * size * size, 1.5f), {2, 16, size, size}));
        const Variable y = pool(in_layout(x, layout), geometry);
        REQUIRE(y.shape() == Shape({2, 16, size / 2, size / 2}));
        CHECK((values_of(y) == std::vector<float>(y.value().numel(), 1.5f)));
      }
}

TEST_CASE("pooling rejects windows that cannot be") {
  const OnDevice device;
  const Variable x(Tensor::zeros({1, 1, 2, 2}, layouts(1)[0], test_device()));
  for (const PoolGeometry& bad : {PoolGeometry{PoolKind::max, 0, 1, 0}, PoolGeometry{PoolKind::max, 2, 0, 0},
                                  PoolGeometry{PoolKind::max, 2, 2, 2}, PoolGeometry{PoolKind::max, 3, 1, 0}})
    CHECK_THROWS_AS(pool(x, bad), Error);
  CHECK_THROWS_AS(pool(Variable(Tensor::zeros({1, 4})), {}), Error);
}

TEST_CASE("global_average_pool agrees with the formula") {
  for (const Layout layout : {Layout::plain, Layout::blocked})
    for (const Shape& shape : {Shape{1, 64, 1, 1}, Shape{3, 16, 7, 5}, Shape{5, 48, 8, 8}}) {
      INFO(shape.str());
      const reference::Images one_image{1, shape[0] * shape[1], shape[2] * shape[3]};
      Leaf x(shape, random_values(shape.numel(), 1));
      const Variable y = global_average_pool(in_layout(x.variable(), layout));
      REQUIRE(y.shape() == Shape({shape[0], shape[1]}));
      Array mean = channel_sums(one_image, as_double(values_of(x.variable()))),
            scale = channel_sums(one_image, absolute(as_double(values_of(x.variable()))));
      for (double& m : mean) m /= one_image.count();
      for (double& s : scale) s /= one_image.count();
      check_close("y", values_of(y), mean, scale, 1e-6);
      const auto dy = random_values(y.value().numel(), 2);
      backward(weighted_sum(y, dy));
      Array dx(std::size_t(shape.numel()));
      one_image.for_each([&](auto i, auto c) { dx[i] = dy[c] / one_image.count(); });
      check_close("dx", x.gradient(), dx, 1e-6);
    }
}
