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
            fn(static_cast<std::size_t>((t * batch + n) * features + f),
               static_cast<std::size_t>(f * taps + j),
               static_cast<std::size_t>(((t + j) * batch + n) * features + f));
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
    Array dw(static_cast<std::size_t>(features * taps));
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
