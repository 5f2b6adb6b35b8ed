#pragma once
// conv2d against its definition, on any device.

#include "tests/support/variables.h"

namespace topknot::testing {

using reference::absolute;
using reference::Conv;

// A convolution of random values on the device of the test.
struct ConvCase {
  Conv g;
  bool bias;
  Layout layout;

  std::string str() const {
    return g.str() + (bias ? ", bias" : "") +
           (layout == Layout::blocked ? ", blocked"
            : layout == Layout::nhwc  ? ", nhwc"
                                      : ", plain");
  }
  Shape x_shape() const { return {g.n, g.in, g.height, g.width}; }
  ConvGeometry geometry() const { return g.geometry(); }
  // Winograd's transformations cost some digits.
  double tolerance() const { return on_gpu() ? 2e-5 : g.kernel == 3 && g.stride == 1 ? 3e-5 : 3e-6; }
};

// Value and gradients against the definition in float64.
inline void check_case(const ConvCase& c, int threads = 1) {
  const Threads scope(threads);
  INFO(c.str() << ", " << threads << " threads");
  const Conv& g = c.g;
  Leaf x(c.x_shape(), random_activations(g.x_size(), 1)),
      w(c.geometry().weight_shape(), random_values(g.w_size(), 2)), b({g.out}, random_values(g.out, 3));
  const auto dy = random_activations(g.y_size(), 4);
  const Variable y = conv2d(activation(x.variable(), c.layout), w.variable(),
                            c.bias ? b.variable() : Variable(), c.geometry());
  REQUIRE(y.shape() == Shape({g.n, g.out, g.out_height(), g.out_width()}));
  CHECK(y.value().layout() == kernels_for<ConvKernels>(y).output_layout(c.geometry()));
  REQUIRE(y.value().dtype() == activation_type());
  backward(weighted_sum(y, dy));

  const bool bf16 = activation_type() == DType::bf16;
  const Array rx = as_double(values_of(x.variable())),
              rw = as_double(rounded_to(activation_type(), values_of(w.variable()))),
              rb = as_double(values_of(b.variable())), rdy = as_double(dy);
  Array ry = reference::conv2d(g, rx, rw), ry_scale = reference::conv2d(g, absolute(rx), absolute(rw));
  const reference::Images out{g.n, g.out, g.out_height() * g.out_width()};
  if (c.bias) ry = add_bias(out, ry, rb), ry_scale = add_bias(out, ry_scale, absolute(rb));
  // In bfloat16 a bias is added to what is rounded already.
  check_close("y", values_of(y), ry, ry_scale, (bf16 && c.bias ? 2 : 1) * rounding(c.tolerance()));
  check_close("dx", x.gradient(), conv2d_input_gradient(g, rw, rdy),
              conv2d_input_gradient(g, absolute(rw), absolute(rdy)), rounding(c.tolerance()));
  // cuDNN may round the weight's gradient to its inputs' type; the matrix product that is a 1x1 convolution does
  // not.
  const bool product = g.kernel == 1 && g.stride == 1 && g.padding == 0 && g.groups == 1;
  check_close("dw", w.gradient(), conv2d_weight_gradient(g, rx, rdy),
              conv2d_weight_gradient(g, absolute(rx), absolute(rdy)),
              product ? c.tolerance() : rounding(c.tolerance()));
  if (c.bias)
    check_close("db", b.gradient(), channel_sums(out, rdy), channel_sums(out, absolute(rdy)),
                on_gpu() ? 2e-5 : 3e-6);
}

}  // namespace topknot::testing
