#include "nn/ops/linear.h"

#include "nn/core/pass_cost.h"

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

}  // namespace topknot
