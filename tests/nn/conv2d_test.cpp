#include "tests/support/conv_case.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;
using reference::Conv;
using reference::plus;

namespace {

using Case = ConvCase;

Case plain(Conv g, bool bias = false) {
  return {g, bias, Layout::plain};
}
// The layout that a layer before this one would have left.
Case blocked(Conv g, bool bias = false) {
  return {g, bias, g.in % channel_block() == 0 ? Layout::blocked : Layout::plain};
}

// Each convolution in that form, on each number of threads.
using Form = Case (*)(Conv, bool);
void check(Form form, bool bias, const std::vector<Conv>& all, const std::vector<int>& threads = {1}) {
  for (const int count : threads)
    for (const Conv& g : all) check_case(form(g, bias), count);
}

}  // namespace

TEST_CASE("conv2d agrees with the formula: 3x3, few channels, odd sizes, with and without bias") {
  for (const bool bias : {false, true})
    check(plain, bias,
          {Conv{1, 1, 5, 7, 1, 3, 1, 1}, Conv{2, 3, 9, 9, 6, 3, 1, 1}, Conv{3, 3, 7, 5, 16, 3, 1, 1},
           Conv{2, 3, 11, 8, 64, 3, 2, 1}, Conv{2, 1, 6, 6, 16, 3, 1, 0}, Conv{3, 6, 9, 7, 3, 3, 2, 1},
           Conv{2, 6, 7, 7, 16, 3, 1, 1}, Conv{2, 3, 1, 1, 16, 3, 1, 1}});
}

TEST_CASE("conv2d agrees with the formula: blocked channels, sizes that Winograd's tiles do not divide") {
  check(
      blocked, false,
      {Conv{1, 16, 4, 4, 16, 3, 1, 1}, Conv{2, 16, 9, 10, 32, 3, 1, 1}, Conv{1, 48, 6, 11, 48, 3, 1, 1},
       Conv{2, 64, 7, 7, 64, 3, 1, 1}, Conv{2, 64, 3, 3, 64, 3, 1, 1}, Conv{2, 64, 5, 4, 128, 3, 1, 1},
       Conv{2, 128, 6, 5, 128, 3, 1, 1}, Conv{2, 256, 2, 2, 256, 3, 1, 1}, Conv{3, 128, 1, 1, 256, 3, 1, 1}});
  check(blocked, true,
        {Conv{3, 16, 5, 7, 16, 3, 1, 1}, Conv{2, 32, 8, 8, 32, 3, 1, 1}, Conv{3, 64, 2, 2, 64, 3, 1, 1},
         Conv{1, 256, 4, 5, 256, 3, 1, 1}});
}

// The second works with threads together where there are three; the last is too wide for threads apart.
TEST_CASE("conv2d agrees with the formula: pixels enough for Winograd's, threads apart and together") {
  check(blocked, true, {Conv{3, 16, 12, 13, 16, 3, 1, 1}}, {1, 2, 3});
  check(blocked, false,
        {Conv{2, 32, 15, 14, 48, 3, 1, 1}, Conv{5, 48, 4, 21, 16, 3, 1, 1}, Conv{1, 64, 21, 22, 32, 3, 1, 1},
         Conv{7, 16, 33, 31, 32, 3, 1, 1}},
        {1, 2, 3});
  check(blocked, false, {Conv{1, 272, 20, 20, 256, 3, 1, 1}}, {2});
}

// The last one without bias has few pixels, which products serve where it is blocked.
TEST_CASE("conv2d with wide padding: as in Deep Speech, and on either side of what AVX2 kernels take") {
  check(blocked, true, {Conv{2, 32, 12, 13, 32, {21, 11}, {2, 1}, {10, 5}}}, {1, 2});
  check(blocked, false,
        {Conv{2, 16, 5, 9, 32, {1, 9}, 1, {0, 4}}, Conv{2, 16, 5, 9, 32, {1, 7}, 1, {0, 3}},
         Conv{2, 128, 5, 9, 128, {1, 9}, 1, {0, 4}}},
        {1, 2});
  check(plain, true, {Conv{2, 1, 11, 9, 32, {5, 11}, 2, {2, 5}}}, {1, 2});
}

TEST_CASE("conv2d agrees with the formula: many channels on few pixels, and on many") {
  check(blocked, true,
        {Conv{1, 128, 3, 2, 128, 3, 1, 1}, Conv{3, 144, 7, 6, 128, 3, 2, 1},
         Conv{2, 128, 13, 14, 128, 1, 1, 0}},
        {1, 2, 3});
  check(blocked, false,
        {Conv{2, 128, 5, 7, 128, {3, 1}, {1, 2}, {1, 0}}, Conv{3, 128, 9, 10, 144, 1, 1, 0},
         Conv{2, 96, 25, 24, 96, 3, 2, 1}},
        {1, 2, 3});
}

TEST_CASE("conv2d agrees with the formula: stride 2 on odd and even sizes") {
  for (const std::int64_t size : {7, 8, 9}) {
    check(blocked, false,
          {Conv{2, 16, size, size, 32, 3, 2, 1}, Conv{2, 64, size, 5, 128, 3, 2, 1},
           Conv{1, 128, size, size, 256, 3, 2, 1}, Conv{2, 64, size, size, 128, 1, 2, 0},
           Conv{1, 48, size, size, 16, 5, 2, 2}});
    check(blocked, true, {Conv{1, 32, size, size + 1, 64, 3, 2, 1}});
  }
}

TEST_CASE("conv2d agrees with the formula: 1x1 and 5x5 kernels, lenet's layers among them") {
  check(plain, true,
        {Conv{2, 3, 5, 5, 16, 1, 1, 0}, Conv{2, 1, 12, 13, 6, 5, 1, 2}, Conv{3, 6, 9, 8, 16, 5, 1, 0}});
  check(plain, false, {Conv{1, 1, 4, 3, 6, 1, 1, 0}, Conv{2, 3, 9, 9, 16, 5, 2, 2}});
  check(blocked, true, {Conv{3, 16, 5, 7, 32, 1, 1, 0}, Conv{2, 16, 6, 7, 16, 5, 1, 2}});
  check(blocked, false,
        {Conv{2, 64, 7, 3, 64, 1, 1, 0}, Conv{2, 128, 3, 5, 256, 1, 1, 0}, Conv{1, 256, 1, 1, 128, 1, 2, 0}});
}

TEST_CASE("conv2d agrees with the formula where the layouts of input and output differ") {
  check(blocked, true, {Conv{2, 16, 6, 5, 6, 3, 1, 1}});
  check(blocked, false, {Conv{2, 64, 5, 5, 10, 1, 1, 0}, Conv{2, 32, 7, 7, 3, 5, 2, 2}});
  check(plain, true, {Conv{2, 16, 6, 5, 16, 3, 1, 1}});  // a plain input where a blocked one was possible
  check(plain, false,
        {Conv{2, 64, 7, 7, 128, 3, 2, 1}, Conv{2, 6, 5, 5, 64, 1, 1, 0}, Conv{2, 48, 5, 6, 6, 3, 1, 1}});
}

TEST_CASE("conv2d agrees with the formula: kernels, strides and paddings that differ in height and width") {
  check(plain, true,
        {Conv{2, 3, 9, 8, 16, {1, 7}, 1, {0, 3}}, Conv{2, 5, 8, 9, 6, {3, 2}, {2, 1}, {0, 1}},
         Conv{2, 1, 13, 9, 32, {5, 3}, {2, 1}, {2, 1}}});
  check(blocked, false, {Conv{2, 64, 7, 6, 96, {7, 1}, 1, {3, 0}}, Conv{1, 64, 6, 7, 64, {1, 3}, 1, {0, 1}}});
  check(blocked, true, {Conv{3, 32, 11, 10, 32, {3, 3}, {2, 1}, {1, 1}}});
  check(blocked, false, {Conv{2, 32, 9, 9, 48, {3, 5}, {1, 2}, {2, 0}}}, {2});
}

TEST_CASE("conv2d agrees with the formula: groups, with and without bias, of whole blocks and not") {
  for (const bool bias : {false, true}) {
    check(plain, bias,
          {Conv{2, 4, 6, 5, 6, 3, 1, 1, 2}, Conv{2, 6, 7, 7, 9, {1, 3}, {2, 1}, {0, 1}, 3},
           Conv{2, 30, 4, 6, 15, 1, 1, 0, 5}});
    check(blocked, bias,
          {Conv{2, 32, 6, 7, 64, 5, 1, 2, 2}, Conv{1, 96, 5, 5, 32, 3, 2, 1, 2},
           Conv{2, 48, 5, 6, 48, 3, 1, 1, 2}, Conv{2, 16, 6, 6, 16, 3, 1, 1, 4}});
  }
}

TEST_CASE("conv2d agrees with the formula: depthwise, whole blocks of channels and not, odd sizes") {
  const std::vector<int> threads{1, 2};
  check(blocked, false,
        {Conv{3, 32, 7, 9, 32, 3, 1, 1, 32}, Conv{2, 144, 6, 5, 144, 5, 2, 2, 144},
         Conv{5, 32, 13, 11, 32, 5, {1, 2}, {2, 1}, 32}},
        threads);
  check(blocked, false, {Conv{2, 32, 2, 1, 32, 5, 1, 2, 32}}, threads);  // taps that see no pixel
  check(blocked, true, {Conv{2, 48, 9, 8, 48, 3, 2, 1, 48}, Conv{2, 64, 7, 7, 64, 5, 1, 2, 64}}, threads);
  check(plain, false,
        {Conv{3, 40, 6, 19, 40, {7, 5}, {2, 1}, {3, 4}, 40}, Conv{3, 58, 6, 7, 58, 3, 2, 1, 58},
         Conv{2, 32, 5, 6, 32, {3, 1}, 1, {1, 0}, 32}},
        threads);
  check(plain, true, {Conv{2, 24, 7, 5, 24, 3, 1, 1, 24}, Conv{2, 5, 6, 5, 5, 3, 1, 1, 5}}, threads);
  check(plain, true, {Conv{2, 8, 5, 6, 16, 3, 1, 1, 8}});  // two outputs for each channel
}

TEST_CASE("conv2d agrees with the formula where channels do not fill blocks") {
  const std::vector<int> threads{1, 2};
  check(blocked, false, {Conv{5, 96, 7, 6, 24, 1, 1, 0}}, threads);
  check(plain, false, {Conv{5, 24, 7, 6, 144, 1, 1, 0}, Conv{2, 40, 6, 7, 17, 3, 2, 1}}, threads);
  check(plain, true, {Conv{2, 58, 5, 5, 58, 1, 1, 0}, Conv{3, 24, 9, 9, 40, 3, 1, 1}}, threads);
  check(blocked, true, {Conv{2, 512, 4, 3, 1000, 1, 1, 0}}, threads);  // worked as a whole batch
  check(plain, false, {Conv{2, 232, 3, 3, 1000, 1, 1, 0}}, threads);
}

TEST_CASE("conv2d works through batches that are cut unevenly over chunks and threads") {
  const std::vector<int> threads{1, 2, 3};
  check(blocked, true, {Conv{7, 16, 9, 9, 16, 3, 1, 1}, Conv{3, 128, 5, 5, 128, 3, 1, 1}}, threads);
  check(blocked, false, {Conv{5, 32, 6, 6, 64, 3, 2, 1}}, threads);
  check(plain, true, {Conv{5, 1, 9, 9, 6, 5, 1, 2}}, threads);
  check(plain, false, {Conv{1, 6, 7, 7, 16, 3, 1, 1}}, threads);
  check(plain, false, {Conv{15, 3, 32, 32, 16, 3, 1, 1}});
  check(blocked, false, {Conv{17, 16, 32, 32, 16, 3, 1, 1}}, {2});
}

TEST_CASE("conv2d: one layer takes inputs of different sizes, batches and layouts in turn") {
  const ConvGeometry geometry{16, 16, 3, 1, 1};
  Leaf w(geometry.weight_shape(), random_values(16 * 16 * 9, 1));
  const Array rw = as_double(values_of(w.variable()));
  for (int round = 0; round < 2; ++round)
    for (const Layout layout : {Layout::blocked, Layout::plain})
      for (const Conv& g : {Conv{2, 16, 8, 8, 16, 3, 1, 1}, Conv{5, 16, 8, 8, 16, 3, 1, 1},
                            Conv{2, 16, 5, 6, 16, 3, 1, 1}, Conv{2, 16, 6, 5, 16, 3, 1, 1}}) {
        INFO((layout == Layout::blocked ? "blocked, batch " : "plain, batch ") << g.n << ", " << g.height);
        Leaf x({g.n, 16, g.height, g.width}, random_values(g.x_size(), 5));
        const Array rx = as_double(values_of(x.variable()));
        const Variable y = conv2d(in_layout(x.variable(), layout), w.variable(), {}, geometry);
        check_close("y", values_of(y), reference::conv2d(g, rx, rw),
                    reference::conv2d(g, absolute(rx), absolute(rw)), 3e-5);
      }
}

// Where the input gradient alone has no fast kernel with blocked channels, a pass has plans of both kinds.
TEST_CASE("conv2d: one layer takes inputs of more sizes than it keeps plans for") {
  const ConvGeometry geometry{24, 24, 3, 2, 0};
  Leaf w(geometry.weight_shape(), random_values(24 * 24 * 9, 1));
  const auto gradient = [&](std::int64_t height, std::int64_t width) {
    const Conv g{1, 24, height, width, 24, 3, 2, 0};
    Leaf x({1, 24, height, width}, random_values(g.x_size(), 5));
    const Variable y = conv2d(x.variable(), w.variable(), {}, geometry);
    backward(weighted_sum(y, random_values(g.y_size(), 4)));
    return x.gradient();
  };
  const auto first = gradient(8, 12);
  for (int height = 3; height < 24; ++height)
    for (int width = 3; width < 24; ++width) gradient(height, width);
  CHECK(gradient(8, 12) == first);
}

TEST_CASE("conv2d adds to the weight's gradient: two uses in a graph, then a second backward pass") {
  for (const Conv& g :
       {Conv{3, 16, 6, 6, 16, 3, 1, 1}, Conv{2, 3, 7, 7, 16, 3, 2, 1}, Conv{2, 1, 6, 6, 6, 5, 1, 2},
        Conv{2, 128, 4, 4, 128, 3, 1, 1}, Conv{2, 16, 15, 15, 32, 3, 1, 1},
        Conv{3, 24, 6, 6, 24, 3, 1, 1, 24}, Conv{2, 24, 5, 5, 40, 1, 1, 0}}) {
    const Case c = blocked(g, true);
    INFO(c.str());
    Leaf w(c.geometry().weight_shape(), random_values(g.w_size(), 2)), b({g.out}, random_values(g.out, 3));
    const reference::Images out{g.n, g.out, g.out_height() * g.out_width()};
    Array dw(std::size_t(g.w_size()), 0.0), dw_scale = dw, db(std::size_t(g.out), 0.0), db_scale = db;
    const auto use = [&](std::uint32_t stream) {
      const auto x = random_values(g.x_size(), stream), dy = random_values(g.y_size(), stream + 1);
      dw = plus(dw, conv2d_weight_gradient(g, as_double(x), as_double(dy)));
      dw_scale = plus(dw_scale, conv2d_weight_gradient(g, absolute(as_double(x)), absolute(as_double(dy))));
      db = plus(db, channel_sums(out, as_double(dy)));
      db_scale = plus(db_scale, channel_sums(out, absolute(as_double(dy))));
      const Variable in(to_layout(Tensor::from(x, c.x_shape()), c.layout));
      return weighted_sum(conv2d(in, w.variable(), b.variable(), c.geometry()), dy);
    };
    const Variable first = use(10), second = use(20);
    const Variable both("both", Tensor::from({0}, {1}), {first, second}, [=](Tensor grad) {
      first.accumulate_grad(grad);
      second.accumulate_grad(grad);
    });
    backward(both);
    check_close("dw of two uses", w.gradient(), dw, dw_scale, c.tolerance());
    check_close("db of two uses", b.gradient(), db, db_scale, 3e-6);
    backward(use(30));
    check_close("dw after another pass", w.gradient(), dw, dw_scale, c.tolerance());
    check_close("db after another pass", b.gradient(), db, db_scale, 3e-6);

    w.clear();
    b.clear();
    dw.assign(dw.size(), 0.0), dw_scale = dw, db.assign(db.size(), 0.0), db_scale = db;
    backward(use(40));
    check_close("dw after mark_gradients_unwritten", w.gradient(), dw, dw_scale, c.tolerance());
    check_close("db after mark_gradients_unwritten", b.gradient(), db, db_scale, 3e-6);
  }
}

TEST_CASE("conv2d adds to the gradient of an input that two convolutions read") {
  for (const Case& c : {blocked({3, 16, 6, 6, 16, 3, 1, 1}), blocked({2, 16, 15, 15, 32, 3, 1, 1}),
                        blocked({2, 128, 4, 4, 128, 3, 1, 1}), blocked({2, 24, 5, 5, 40, 1, 1, 0}),
                        plain({2, 24, 5, 5, 20, 1, 1, 0}), plain({2, 24, 15, 15, 40, 3, 1, 1})}) {
    const Conv& g = c.g;
    INFO(c.str());
    Leaf x(c.x_shape(), random_values(g.x_size(), 1));
    const Variable read = in_layout(x.variable(), c.layout), in("in", read.value(), {read}, [=](Tensor grad) {
      read.accumulate_grad(std::move(grad));
    });
    Array dx(std::size_t(g.x_size()), 0.0), scale = dx;
    const auto use = [&](std::uint32_t stream) {
      const auto w = random_values(g.w_size(), stream), dy = random_values(g.y_size(), stream + 1);
      dx = plus(dx, conv2d_input_gradient(g, as_double(w), as_double(dy)));
      scale = plus(scale, conv2d_input_gradient(g, absolute(as_double(w)), absolute(as_double(dy))));
      const Variable weight(Tensor::from(w, c.geometry().weight_shape()));
      return weighted_sum(conv2d(in, weight, {}, c.geometry()), dy);
    };
    const Variable first = use(10), second = use(20);
    backward(Variable("both", Tensor::from({0}, {1}), {first, second}, [=](Tensor grad) {
      first.accumulate_grad(grad);
      second.accumulate_grad(grad);
    }));
    check_close("dx", x.gradient(), dx, scale, c.tolerance());
  }
}

TEST_CASE("conv2d rejects shapes that do not fit, and says which") {
  const ConvGeometry geometry{3, 6, 5, 1, 0};
  Leaf w(geometry.weight_shape(), random_values(3 * 6 * 25, 1));
  const auto run = [&](const Shape& x) {
    return conv2d(Variable(Tensor::zeros(x)), w.variable(), {}, geometry);
  };
  CHECK_THROWS_AS(run({1, 4, 8, 8}), Error);
  CHECK_THROWS_AS(run({1, 3, 4, 8}), Error);
  CHECK_THROWS_AS(run({3, 8}), Error);
  CHECK_NOTHROW(run({1, 3, 5, 5}));
  CHECK_THROWS_AS(
      conv2d(Variable(Tensor::zeros({1, 3, 5, 5})), w.variable(), {}, ConvGeometry{3, 6, 5, 0, 0}), Error);
  const Variable x(Tensor::zeros({1, 3, 5, 5})), five(Tensor::zeros({5})), six(Tensor::zeros({6}));
  CHECK_NOTHROW(conv2d(x, w.variable(), six, geometry));
  CHECK_THROWS_AS(conv2d(x, w.variable(), five, geometry), Error);
  CHECK_THROWS_AS(conv2d(x, Variable(Tensor::zeros({6, 3, 5, 4})), six, geometry), Error);
  CHECK_THROWS_AS(ConvGeometry({3, 6, 5, 1, 0, 2}).output_shape({1, 3, 5, 5}), Error);
  CHECK_THROWS_AS(ConvGeometry({3, 6, {1, 7}, 1, 0}).output_shape({1, 3, 5, 5}), Error);
  CHECK(ConvGeometry({3, 6, {1, 7}, 1, {0, 1}}).output_shape({1, 3, 5, 5}) == Shape({1, 6, 5, 1}));
  CHECK(ConvGeometry({8, 4, {1, 7}, 1, {0, 1}, 2}).weight_shape() == Shape({4, 4, 1, 7}));
}
