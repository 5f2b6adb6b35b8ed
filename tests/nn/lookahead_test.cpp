#include "nn/ops/ops.h"

#include "tests/support/lookahead_reference.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;

TEST_CASE("lookahead agrees with the formula, forward and backward, also with more taps than frames") {
  for (const reference::Lookahead& shape : reference::lookaheads()) {
    const std::int64_t rows = shape.frames * shape.batch;
    INFO(shape.frames << " frames of " << shape.batch << ", " << shape.features << " features, " << shape.taps
                      << " taps");
    Leaf x({rows, shape.features}, random_values(rows * shape.features, 1)),
        w({shape.features, shape.taps}, random_values(shape.features * shape.taps, 2));
    const auto dy = random_values(rows * shape.features, 3);
    const Variable y = lookahead(x.variable(), shape.batch, w.variable());
    const auto forward = values_of(y);
    backward(weighted_sum(y, dy));
    const Array rx = as_double(values_of(x.variable())), rw = as_double(values_of(w.variable())),
                rdy = as_double(dy);
    check_close("y", forward, shape.y(rx, rw), shape.y(absolute(rx), absolute(rw)), 1e-6);
    check_close("dx", x.gradient(), shape.dx(rdy, rw), shape.dx(absolute(rdy), absolute(rw)), 1e-6);
    check_close("dw", w.gradient(), shape.dw(rdy, rx), shape.dw(absolute(rdy), absolute(rx)), 1e-6);
  }
  Leaf x({3, 2}, std::vector<float>(6)), w({2, 1}, {1, 1});
  CHECK_THROWS_AS(lookahead(x.variable(), 2, w.variable()), Error);
}
