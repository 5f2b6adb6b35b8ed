#include "nn/ops/kernels.h"

#include <limits>

#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct ActivationCase {
  const char* name;
  Variable (*op)(const Variable&);
  double (*value)(double);
  double (*slope)(double);
  double tolerance = 1e-6;
};

double sigmoid_in_double(double x) {
  return 1 / (1 + std::exp(-x));
}

const std::vector<ActivationCase> kActivations{
    {"relu", relu, [](double x) { return std::max(x, 0.0); }, [](double x) { return x > 0 ? 1.0 : 0.0; }, 0},
    {"relu6", relu6, [](double x) { return std::min(std::max(x, 0.0), 6.0); },
     [](double x) { return x > 0 && x < 6 ? 1.0 : 0.0; }},
    {"clamp", [](const Variable& x) { return clamp(x, -0.5f, 2.0f); },
     [](double x) { return std::min(std::max(x, -0.5), 2.0); },
     [](double x) { return x > -0.5 && x < 2 ? 1.0 : 0.0; }},
    {"hardswish", hardswish, [](double x) { return x * std::min(std::max(x + 3, 0.0), 6.0) / 6; },
     [](double x) { return x <= -3  ? 0.0
                           : x >= 3 ? 1.0
                                    : x / 3 + 0.5; }},
    {"sigmoid", sigmoid, sigmoid_in_double,
     [](double x) { return sigmoid_in_double(x) * sigmoid_in_double(-x); }},
    {"silu", silu, [](double x) { return x * sigmoid_in_double(x); },
     [](double x) { return sigmoid_in_double(x) * (1 + x * sigmoid_in_double(-x)); }},
};

}  // namespace

TEST_CASE("relu, relu6, clamp, hardswish, sigmoid and silu agree with their formulas, the limits included") {
  for (const auto& a : kActivations)
    for (const Layout layout : {Layout::plain, Layout::blocked})
      for (const Shape& shape : {Shape{1, 16, 1, 3}, Shape{9, 16, 17, 15}}) {
        INFO(a.name << " of " << shape.str());
        auto values = random_values(shape.numel(), 1);
        for (float& v : values) v *= 4;
        const std::vector<float> special{0.0f,   -0.0f,   1e-40f, 6.0f,  3.0f,   -3.0f, -0.5f, 2.0f,
                                         100.0f, -100.0f, 1e-30f, 20.0f, -20.0f, 88.0f, -88.0f};
        std::copy(special.begin(), special.end(), values.begin());
        const auto dy = random_values(shape.numel(), 2);
        Leaf x(shape, values);
        const Variable y = a.op(in_layout(x.variable(), layout));
        CHECK(y.value().layout() == layout);
        backward(weighted_sum(y, dy));
        Array ry(values.size()), rdx(values.size()), scale(values.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
          ry[i] = a.value(values[i]);
          rdx[i] = a.slope(values[i]) * dy[i];
          // Two float terms of about (1 + |x|) s(x) meet in silu's slope.
          scale[i] =
              std::abs(rdx[i]) + (1 + std::abs(values[i])) * sigmoid_in_double(values[i]) * std::abs(dy[i]);
        }
        Array y_scale = reference::absolute(ry);
        for (double& s : y_scale) s += 1e-34;  // e^-87 stands for everything below
        check_close("y", values_of(y), ry, y_scale, a.tolerance);
        check_close("dx", x.gradient(), rdx, scale, a.tolerance);
      }
}

TEST_CASE("activation functions of infinities and huge numbers have their limits, and so have their slopes") {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> x{-inf, -3e38f, -1e30f, -1e4f, -89.0f, 89.0f, 1e4f, 1e30f, 3e38f, inf};
  const auto n = static_cast<std::int64_t>(x.size());
  for (const auto& a : kActivations)
    for (const std::int64_t copies : {1, 7}) {  // in vectors, and one by one
      std::vector<float> values;
      for (std::int64_t i = 0; i < copies; ++i) values.insert(values.end(), x.begin(), x.end());
      Leaf leaf({copies * n}, values);
      const Variable y = a.op(leaf.variable());
      backward(weighted_sum(y, std::vector<float>(values.size(), 1.0f)));
      const auto actual = values_of(y), slope = leaf.gradient();
      for (std::size_t i = 0; i < values.size(); ++i) {
        INFO(a.name << " of " << values[i]);
        const bool below = values[i] < 0;
        const float lower = std::string(a.name) == "clamp" ? -0.5f : 0.0f,
                    upper = std::string(a.name) == "relu6"     ? 6.0f
                            : std::string(a.name) == "clamp"   ? 2.0f
                            : std::string(a.name) == "sigmoid" ? 1.0f
                                                               : values[i];
        CHECK((below ? std::abs(actual[i] - lower) < 1e-34f : actual[i] == upper));
        CHECK(std::abs(slope[i] - (!below && upper == values[i] ? 1.0f : 0.0f)) < 1e-34f);
      }
    }
}

TEST_CASE("activation functions let a NaN through; clamp refuses limits without room") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Variable x(Tensor::from(std::vector<float>(37, nan), {37}));
  for (const auto& a : kActivations)
    for (const float v : values_of(a.op(x))) CHECK(std::isnan(v));
  CHECK_THROWS_AS(clamp(x, 1.0f, 1.0f), Error);
}

TEST_CASE("add: both inputs take the whole gradient, in their own layouts") {
  const Shape shape{2, 32, 3, 5};
  const auto a = random_values(shape.numel(), 1), b = random_values(shape.numel(), 2),
             dy = random_values(shape.numel(), 3);
  std::vector<float> sum(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) sum[i] = a[i] + b[i];
  for (const Layout la : {Layout::plain, Layout::blocked})
    for (const Layout lb : {Layout::plain, Layout::blocked}) {
      Leaf left(shape, a), right(shape, b);
      const Variable y = add(in_layout(left.variable(), la), in_layout(right.variable(), lb));
      CHECK(y.value().layout() == la);
      CHECK((values_of(y) == sum));
      backward(weighted_sum(y, dy));
      CHECK((left.gradient() == dy));
      CHECK((right.gradient() == dy));
    }
  CHECK_THROWS_AS(add(Variable(Tensor::zeros({2, 3})), Variable(Tensor::zeros({3, 2}))), Error);
}

TEST_CASE("x + x doubles value and gradient") {
  for (const std::int64_t n : {5, 70000}) {
    Leaf x({n}, random_values(n, 1));
    const auto dy = random_values(n, 2);
    const Variable y = add(x.variable(), x.variable());
    backward(weighted_sum(y, dy));
    std::vector<float> twice_x = random_values(n, 1), twice_dy = dy;
    for (float& v : twice_x) v *= 2;
    for (float& v : twice_dy) v *= 2;
    CHECK((values_of(y) == twice_x));
    CHECK((x.gradient() == twice_dy));
  }
}

TEST_CASE("gradients that two inputs share are not written over: x used three times, relu on one way") {
  // y = relu(x) + x, z = y + x: dx = dz (2 + [x > 0]). relu may write over a gradient only if it alone holds
  // it.
  for (const bool relu_first : {true, false}) {
    const Shape shape{3, 16, 5, 5};
    const auto values = random_values(shape.numel(), 1), dz = random_values(shape.numel(), 2);
    Leaf leaf(shape, values);
    const Variable x = in_layout(leaf.variable(), Layout::blocked);
    const Variable y = relu_first ? add(relu(x), x) : add(x, relu(x));
    const Variable z = relu_first ? add(y, x) : add(x, y);
    backward(weighted_sum(z, dz));
    Array expected(values.size()), scale(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      expected[i] = dz[i] * (values[i] > 0 ? 3.0 : 2.0);
      scale[i] = std::abs(expected[i]);
    }
    check_close("dx", leaf.gradient(), expected, scale, 2e-7);
  }
}

TEST_CASE("dropout: each element is zero or x / (1 - p), and the gradient takes the same mask") {
  const Shape shape{4, 32, 17, 16};
  const auto values = random_values(shape.numel(), 1), dy = random_values(shape.numel(), 2);
  const CounterRng rng(5, RngUse::dropout, 3, 9);
  for (const float p : {0.25f, 0.5f, 0.9f}) {
    Leaf x(shape, values);
    const Variable y = dropout(x.variable(), p, rng);
    backward(weighted_sum(y, dy));
    const auto out = values_of(y), dx = x.gradient();
    Array ry(values.size()), rdx(values.size());
    std::size_t kept = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool keep = out[i] != 0;
      kept += keep;
      ry[i] = keep ? values[i] / (1.0 - p) : 0.0;
      rdx[i] = keep ? dy[i] / (1.0 - p) : 0.0;
    }
    check_close("y", out, ry, 3e-7);
    check_close("dx", dx, rdx, 3e-7);
    const double n = static_cast<double>(values.size());
    CHECK(static_cast<double>(kept) / n == Approx(1.0 - p).margin(5 * std::sqrt(p * (1 - p) / n)));
  }
}

TEST_CASE("dropout draws the same numbers for any layout and thread count; streams differ") {
  const Shape shape{4, 32, 17, 16};
  const Variable x(Tensor::from(std::vector<float>(static_cast<std::size_t>(shape.numel()), 1.0f), shape));
  const auto run = [&](const Variable& input, int threads, std::uint32_t step) {
    const Threads scope(threads);
    return values_of(dropout(input, 0.5f, CounterRng(5, RngUse::dropout, step)));
  };
  const auto once = run(x, 1, 0);
  CHECK((run(x, 2, 0) == once));
  CHECK((run(x, 3, 0) == once));
  CHECK((run(in_layout(x, Layout::blocked), 2, 0) == once));
  CHECK((run(x, 1, 1) != once));
  CHECK_THROWS_AS(dropout(x, 1.0f, CounterRng(1, RngUse::dropout)), Error);
  CHECK_THROWS_AS(dropout(x, -0.1f, CounterRng(1, RngUse::dropout)), Error);
  CHECK((values_of(dropout(x, 0.0f, CounterRng(1, RngUse::dropout))) == values_of(x)));
}

TEST_CASE("subsample_and_pad takes every second pixel and pads channels on both sides") {
  const std::pair<Shape, std::int64_t> cases[] = {
      {{2, 16, 8, 8}, 32}, {{3, 32, 7, 5}, 64},  {{1, 16, 1, 1}, 16}, {{2, 48, 5, 6}, 64},
      {{2, 16, 4, 3}, 48}, {{2, 64, 3, 3}, 128}, {{5, 4, 3, 7}, 9},   {{2, 3, 4, 4}, 8}};
  for (const Layout layout : {Layout::plain, Layout::blocked})
    for (const auto& [in, channels] : cases) {
      if (layout == Layout::blocked && (in[1] % channel_block() || channels % channel_block())) continue;
      INFO(in.str() << " to " << channels << (layout == Layout::blocked ? ", blocked" : ", plain"));
      const std::int64_t height = (in[2] + 1) / 2, width = (in[3] + 1) / 2, before = (channels - in[1]) / 2;
      Leaf x(in, random_values(in.numel(), 1));
      const Variable y = subsample_and_pad(in_layout(x.variable(), layout), channels);
      REQUIRE(y.shape() == Shape({in[0], channels, height, width}));
      CHECK(y.value().layout() == layout);
      const auto values = values_of(x.variable()), dy = random_values(y.value().numel(), 2);
      backward(weighted_sum(y, dy));
      std::vector<float> expected(dy.size(), 0.0f), dx(values.size(), 0.0f);
      for (std::int64_t n = 0; n < in[0]; ++n)
        for (std::int64_t c = 0; c < in[1]; ++c)
          for (std::int64_t i = 0; i < height; ++i)
            for (std::int64_t j = 0; j < width; ++j) {
              const auto from = static_cast<std::size_t>(((n * in[1] + c) * in[2] + 2 * i) * in[3] + 2 * j);
              const auto to =
                  static_cast<std::size_t>(((n * channels + c + before) * height + i) * width + j);
              expected[to] = values[from];
              dx[from] = dy[to];
            }
      CHECK((values_of(y) == expected));
      CHECK((x.gradient() == dx));
    }
  CHECK_THROWS_AS(subsample_and_pad(Variable(Tensor::zeros({1, 16, 2, 2})), 8), Error);
}

TEST_CASE("flatten gives N, C, H, W order from any layout, and the gradient goes back") {
  const Shape shape{3, 32, 3, 5};
  const auto values = random_values(shape.numel(), 1), dy = random_values(shape.numel(), 2);
  for (const Layout layout : {Layout::plain, Layout::blocked}) {
    Leaf x(shape, values);
    const Variable y = flatten(in_layout(x.variable(), layout));
    REQUIRE(y.shape() == Shape({3, 480}));
    CHECK((values_of(y) == values));
    backward(weighted_sum(y, dy));
    CHECK((x.gradient() == dy));
  }
  Leaf features({3, 7}, random_values(21, 3));
  CHECK(flatten(features.variable()).shape() == Shape({3, 7}));
}

TEST_CASE("to_layout there and back gives the same values, blocks of channels side by side") {
  const std::int64_t block = channel_block();
  const Shape shape{2, 48, 3, 2};
  const auto values = random_values(shape.numel(), 1);
  const Tensor x = Tensor::from(values, shape), y = to_layout(x, Layout::blocked);
  CHECK(y.data()[1] == values[6]);      // the next channel's first pixel
  CHECK(y.data()[block] == values[1]);  // the next pixel
  CHECK(y.data()[6 * block] == values[static_cast<std::size_t>(6 * block)]);  // the next block of channels
  CHECK((to_layout(y, Layout::plain).to_vector() == values));
}
