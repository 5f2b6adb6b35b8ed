#include "tests/support/any_threads.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

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
    const double n = double(values.size());
    CHECK(double(kept) / n == Approx(1.0 - p).margin(5 * std::sqrt(p * (1 - p) / n)));
  }
}

TEST_CASE("dropout draws the same numbers for any layout and thread count; streams differ") {
  const Shape shape{4, 32, 17, 16};
  const Variable x(Tensor::from(std::vector<float>(std::size_t(shape.numel()), 1.0f), shape));
  const auto run = [&](const Variable& input, std::uint32_t step) {
    return values_of(dropout(input, 0.5f, CounterRng(5, RngUse::dropout, step)));
  };
  check_any_threads([&] { return run(x, 0); });
  CHECK((run(in_layout(x, Layout::blocked), 0) == run(x, 0)));
  CHECK((run(x, 1) != run(x, 0)));
  CHECK_THROWS_AS(dropout(x, 1.0f, CounterRng(1, RngUse::dropout)), Error);
  CHECK_THROWS_AS(dropout(x, -0.1f, CounterRng(1, RngUse::dropout)), Error);
  CHECK((values_of(dropout(x, 0.0f, CounterRng(1, RngUse::dropout))) == values_of(x)));
}

TEST_CASE("to_layout there and back gives the same values, blocks of channels side by side") {
  const std::int64_t block = channel_block();
  const Shape shape{2, 48, 3, 2};
  const auto values = random_values(shape.numel(), 1);
  const Tensor x = Tensor::from(values, shape), y = to_layout(x, Layout::blocked);
  CHECK(y.data()[1] == values[6]);                               // the next channel's first pixel
  CHECK(y.data()[block] == values[1]);                           // the next pixel
  CHECK(y.data()[6 * block] == values[std::size_t(6 * block)]);  // the next block of channels
  CHECK((to_layout(y, Layout::plain).to_vector() == values));
}
