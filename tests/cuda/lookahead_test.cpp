// The lookahead convolution on a GPU against the formula in float64.
#include "nn/ops/ops.h"

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/lookahead_reference.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using namespace testing;
using reference::absolute;
using testing::CaughtInput;
using testing::gpu_tensor;
using testing::GpuLeaf;
using testing::rounded_to;

TEST_CASE("lookahead on a GPU agrees with the formula, forward and backward") {
  const OnGpu gpu;
  for (const DType type : {DType::f32, DType::bf16})
    for (const reference::Lookahead& shape : reference::lookaheads()) {
      INFO(shape.frames << " frames of " << shape.batch << (type == DType::bf16 ? ", bf16" : ""));
      const double tolerance = type == DType::bf16 ? 4e-3 : 1e-6;
      const Shape rows{shape.frames * shape.batch, shape.features};
      const auto values = rounded_to(type, random_values(rows.numel(), 1)),
                 weights = random_values(shape.features * shape.taps, 2),
                 dy = rounded_to(type, random_values(rows.numel(), 3));
      const CaughtInput x(gpu_tensor(values, rows, Layout::plain, type));
      const GpuLeaf w({shape.features, shape.taps}, weights);
      const Variable y = lookahead(x.variable(), shape.batch, w.variable());
      const Array rx = as_double(values), rw = as_double(weights), rdy = as_double(dy);
      check_close("y", testing::values_of(y.value()), shape.y(rx, rw), shape.y(absolute(rx), absolute(rw)),
                  tolerance);
      testing::backward_from({{y, dy}});
      check_close("dx", x.gradient(), shape.dx(rdy, rw), shape.dx(absolute(rdy), absolute(rw)), tolerance);
      check_close("dw", w.gradient(), shape.dw(rdy, rx), shape.dw(absolute(rdy), absolute(rx)), 1e-6);
    }
}

}  // namespace
}  // namespace topknot
