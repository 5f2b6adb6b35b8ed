#include "tests/support/probe.h"

using namespace topknot;
using namespace topknot::testing;

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
    y[i] = static_cast<double>(x[i]) + w[at];
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
