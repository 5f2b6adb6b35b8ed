// The lookahead convolution and positions.
#include "tests/support/probe.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

using reference::absolute;

namespace {

// The lookahead convolution by its formula, in double, and its gradients.
struct Lookahead {
  std::int64_t frames, batch, features, taps;

  // fn(row, f, j, row of x): one product of the formula.
  template <class Fn>
  void each(const Fn& fn) const {
    for (std::int64_t t = 0; t < frames; ++t)
      for (std::int64_t n = 0; n < batch; ++n)
        for (std::int64_t f = 0; f < features; ++f)
          for (std::int64_t j = 0; j < taps && t + j < frames; ++j)
            fn(std::size_t((t * batch + n) * features + f), std::size_t(f * taps + j),
               std::size_t(((t + j) * batch + n) * features + f));
  }
  Array y(const Array& x, const Array& w) const {
    Array y(x.size());
    each([&](std::size_t row, std::size_t tap, std::size_t from) { y[row] += w[tap] * x[from]; });
    return y;
  }
  Array dx(const Array& dy, const Array& w) const {
    Array dx(dy.size());
    each([&](std::size_t row, std::size_t tap, std::size_t from) { dx[from] += w[tap] * dy[row]; });
    return dx;
  }
  Array dw(const Array& dy, const Array& x) const {
    Array dw(std::size_t(features * taps));
    each([&](std::size_t row, std::size_t tap, std::size_t from) { dw[tap] += dy[row] * x[from]; });
    return dw;
  }
};

}  // namespace

TEST_CASE("lookahead agrees with the formula, forward and backward, also with more taps than frames") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const Lookahead& shape : {Lookahead{1, 1, 1, 1}, {5, 1, 3, 2}, {4, 3, 17, 6}, {40, 2, 33, 21}}) {
    const std::int64_t rows = shape.frames * shape.batch;
    INFO(shape.frames << " frames of " << shape.batch << ", " << shape.features << " features, " << shape.taps
                      << " taps");
    Leaf x({rows, shape.features}, random_activations(rows * shape.features, 1)),
        w({shape.features, shape.taps}, random_values(shape.features * shape.taps, 2));
    const auto dy = random_activations(rows * shape.features, 3);
    const Variable y = lookahead(activation(x.variable()), shape.batch, w.variable());
    const auto forward = values_of(y);
    backward(weighted_sum(y, dy));
    const Array rx = as_double(values_of(x.variable())), rw = as_double(values_of(w.variable())),
                rdy = as_double(dy);
    check_close("y", forward, shape.y(rx, rw), shape.y(absolute(rx), absolute(rw)), rounding(1e-6));
    check_close("dx", x.gradient(), shape.dx(rdy, rw), shape.dx(absolute(rdy), absolute(rw)), rounding(1e-6));
    check_close("dw", w.gradient(), shape.dw(rdy, rx), shape.dw(absolute(rdy), absolute(rx)), 1e-6);
  }
  Leaf x({3, 2}, std::vector<float>(6)), w({2, 1}, {1, 1});
  CHECK_THROWS_AS(lookahead(x.variable(), 2, w.variable()), Error);
}

TEST_CASE("add_positions adds row t to every sequence's token t; positions behind the window get 0") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const std::int64_t batch = 3, steps = 4, positions = 6, width = 5, n = batch * steps * width;
  const auto x = random_activations(n, 1), w = random_values(positions * width, 2),
             dy = random_activations(n, 3);
  const Probe result =
      probe([&](auto in) { return add_positions(in[0], batch, in[1]); },
            {{{batch * steps, width}, x}, {{positions, width}, w, Layout::plain, /*parameter=*/true}}, dy,
            test_device(), activation_type());
  Array y(x.size()), scale(x.size()), dw(w.size(), 0.0), dw_scale(w.size(), 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t row = i / width, at = row / batch * width + i % width;
    y[i] = double(x[i]) + w[at];
    scale[i] = std::abs(x[i]) + std::abs(w[at]);
    dw[at] += dy[i], dw_scale[at] += std::abs(dy[i]);
  }
  check_close("y", result.value, y, scale, rounding(1e-6));
  CHECK(result.gradients[0] == dy);
  check_close("dw", result.gradients[1], dw, dw_scale, 1e-6);
}

TEST_CASE("add_positions refuses more steps than positions and rows that no batch divides") {
  const Variable x(Tensor::zeros({6, 2}));
  CHECK_THROWS_AS(add_positions(x, 2, Variable(Tensor::zeros({2, 2}))), Error);
  CHECK_THROWS_AS(add_positions(x, 4, Variable(Tensor::zeros({9, 2}))), Error);
  CHECK_THROWS_AS(add_positions(x, 2, Variable(Tensor::zeros({9, 3}))), Error);
}
