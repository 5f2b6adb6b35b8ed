#include "nn/ops/conv2d.h"

#include <fmt/format.h>

#include "nn/core/pass_cost.h"

namespace topknot {

Shape ConvGeometry::output_shape(const Shape& x) const {
  TOPKNOT_CHECK(in > 0 && out > 0 && kernel > 0 && stride > 0 && padding >= 0,
                "convolution: channels, kernel and stride must be positive");
  TOPKNOT_CHECK(x.rank() == 4 && x[1] == in,
                fmt::format("convolution: input {} for {} input channels", x.str(), in));
  TOPKNOT_CHECK(x[2] + 2 * padding >= kernel && x[3] + 2 * padding >= kernel,
                "convolution: a kernel larger than the padded input " + x.str());
  return {x[0], out, output_size(x[2]), output_size(x[3])};
}

double ConvGeometry::flops(const Shape& x) const {
  return 2.0 * static_cast<double>(output_shape(x).numel() * in * kernel * kernel);
}

Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias,
                const ConvGeometry& geometry) {
  const Shape shape = geometry.output_shape(x.shape());
  TOPKNOT_CHECK(weight.shape() == geometry.weight_shape(), "conv2d: weight " + weight.shape().str());
  const auto& kernels = kernels_for<ConvKernels>(x);
  Tensor y = Tensor::empty(shape, kernels.output_layout(geometry), x.value().device(), x.value().dtype());
  PassCost::add_flops(geometry.flops(x.shape()));
  const OpState state =
      kernels.forward(geometry, x.value(), weight.value(), bias.defined() ? bias.value() : Tensor(), y);
  std::vector<Variable> inputs{x, weight};
  if (bias.defined()) inputs.push_back(bias);
  return {"conv2d", y, std::move(inputs), [=, &kernels](Tensor grad) {
            PassCost::add_flops(geometry.flops(x.shape()) * (weight.requires_grad() + x.requires_grad()));
            WeightedGradients out(x, weight, bias);
            kernels.backward(geometry, x.value(), weight.value(), grad, state, out);
            x.accumulate_grad(std::move(out.x.tensor));
          }};
}

}  // namespace topknot
