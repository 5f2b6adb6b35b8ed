#include "nn/core/pass_cost.h"
#include "nn/ops/cpu/gemm.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable linear(const Variable& x, const Variable& weight, const Variable& bias) {
  const Shape &in = x.shape(), &w = weight.shape();
  TOPKNOT_CHECK(in.rank() == 2 && w.rank() == 2 && in[1] == w[1],
                "linear: input " + in.str() + ", weight " + w.str());
  TOPKNOT_CHECK(!bias.defined() || bias.shape() == Shape{w[0]}, "linear: bias " + bias.shape().str());
  const auto& kernels = kernels_for<LinearKernels>(x);
  Tensor y = Tensor::empty({in[0], w[0]}, Layout::plain, x.value().device(), x.value().dtype());
  const double flops = 2.0 * static_cast<double>(in[0] * w.numel());
  PassCost::add_flops(flops);
  const OpState state =
      kernels.forward(x.value(), weight.value(), bias.defined() ? bias.value() : Tensor(), y);
  std::vector<Variable> inputs{x, weight};
  if (bias.defined()) inputs.push_back(bias);
  return {"linear", y, std::move(inputs), [=, &kernels](Tensor grad) {
            PassCost::add_flops(flops * (weight.requires_grad() + x.requires_grad()));
            WeightedGradients out(x, weight, bias);
            kernels.backward(x.value(), weight.value(), grad, state, out);
            x.accumulate_grad(std::move(out.x.tensor));
          }};
}

namespace {

// On a CPU with few rows products are in fp32 under bfloat16 too: rounding the weight takes longer.

Tensor operand(const Tensor& x) {
  return x.dim(0) <= kFewRows ? in_form(x, Layout::plain, DType::f32) : x;
}

// Writes to `out` what fn does to a tensor of the products' type.
void result(DType type, Tensor& out, const auto& fn) {
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

const bool linear_registered = add_cpu_kernels<LinearKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot
