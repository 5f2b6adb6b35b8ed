// The fully connected layer, by matrix products. With few rows they are in fp32, under bfloat16 too: rounding the weight
// takes longer than the product.
#include "nn/ops/linear.h"

#include "nn/ops/cpu/gemm.h"
#include "nn/ops/layout.h"

namespace topknot {
namespace {

Tensor operand(const Tensor& x) {
  return x.dim(0) <= kFewRows ? in_form(x, Layout::plain, DType::f32) : x;
}

// Writes to `out` what fn does to a tensor of the products' type.
template <class Fn>
void result(DType type, Tensor& out, const Fn& fn) {
  if (out.dtype() == type) return fn(out);
  Tensor wide = Tensor::empty(out.shape(), Layout::plain, {}, type);
  fn(wide);
  out = in_form(wide, Layout::plain, out.dtype());
}

OpState forward(const Tensor& input, const Tensor& weight, const Tensor& bias, Tensor& output) {
  const Tensor x = operand(input);
  result(x.dtype(), output, [&](Tensor& y) {
    matmul({.m = x.dim(0),
            .n = weight.dim(0),
            .k = x.dim(1),
            .type = x.dtype(),
            .b_type = DType::f32,
            .c_type = y.dtype(),
            .b_transposed = true,
            .bias = bias.defined()},
           x.data(), weight.data(), y.data(), bias.defined() ? bias.data() : nullptr);
  });
  return {};
}

void backward(const Tensor& input, const Tensor& weight, const Tensor& gradient, const OpState&,
              WeightedGradients& to) {
  const Tensor x = operand(input), dy = operand(gradient);
  const std::int64_t n = x.dim(0), features = x.dim(1), out = weight.dim(0);
  if (to.bias.data) write_gradient(to.bias, sum_over_rows(dy));
  if (to.weight.data)
    matmul({.m = out,
            .n = features,
            .k = n,
            .type = x.dtype(),
            .a_transposed = true,
            .add = to.weight.accumulate},
           dy.data(), x.data(), to.weight.data);
  if (!to.x.tensor.defined()) return;
  write_or_add(to.x, [&](Tensor& input_gradient) {
    result(x.dtype(), input_gradient, [&](Tensor& dx) {
      matmul({.m = n, .n = features, .k = out, .type = x.dtype(), .b_type = DType::f32, .c_type = dx.dtype()},
             dy.data(), weight.data(), dx.data());
    });
  });
}

const RegisterKernels<LinearKernels> linear_registered(DeviceKind::cpu,
                                                       {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot
