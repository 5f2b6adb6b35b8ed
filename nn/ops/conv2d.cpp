#include <fmt/format.h>

#include <algorithm>

#include "nn/core/pass_cost.h"
#include "nn/ops/kernels.h"

namespace topknot {

Shape ConvGeometry::output_shape(const Shape& x) const {
  TOPKNOT_CHECK(in > 0 && out > 0 && std::min(kernel.height, kernel.width) > 0 &&
                    std::min(stride.height, stride.width) > 0 && std::min(padding.height, padding.width) >= 0,
                "convolution: channels, kernel and stride must be positive");
  TOPKNOT_CHECK(
      groups > 0 && in % groups == 0 && out % groups == 0,
      fmt::format("convolution: {} groups do not divide {} input and {} output channels", groups, in, out));
  TOPKNOT_CHECK(x.rank() == 4 && x[1] == in,
                fmt::format("convolution: input {} for {} input channels", x.str(), in));
  const std::int64_t height = x[2] + 2 * padding.height - kernel.height,
                     width = x[3] + 2 * padding.width - kernel.width;
  TOPKNOT_CHECK(height >= 0 && width >= 0, "convolution: a kernel larger than the padded input " + x.str());
  return {x[0], out, height / stride.height + 1, width / stride.width + 1};
}

double ConvGeometry::flops(const Shape& x) const {
  return 2.0 * static_cast<double>(output_shape(x).numel() * (in / groups) * kernel.height * kernel.width);
}

Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias,
                const ConvGeometry& geometry) {
  const Shape shape = geometry.output_shape(x.shape());
  TOPKNOT_CHECK(weight.shape() == geometry.weight_shape(), "conv2d: weight " + weight.shape().str());
  TOPKNOT_CHECK(!bias.defined() || bias.shape() == Shape{geometry.out}, "conv2d: bias " + bias.shape().str());
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
