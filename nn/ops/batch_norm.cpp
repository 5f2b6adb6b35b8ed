#include <fmt/format.h>

#include "nn/core/pass_cost.h"
#include "nn/ops/kernels.h"

namespace topknot {
namespace {

void check_shapes(const char* op, const Shape& x, Layout layout, const Variable& gamma, const Variable& beta,
                  const Variable& residual) {
  TOPKNOT_CHECK(x.rank() == 4, fmt::format("{}: input must be [N, C, H, W], not {}", op, x.str()));
  TOPKNOT_CHECK(gamma.shape() == Shape({x[1]}) && beta.shape() == Shape({x[1]}),
                fmt::format("{}: gamma and beta must have one value per channel of {}", op, x.str()));
  if (!residual.defined()) return;
  TOPKNOT_CHECK(residual.shape() == x,
                fmt::format("{}: residual {} for output {}", op, residual.shape().str(), x.str()));
  TOPKNOT_CHECK(residual.value().layout() == layout,
                fmt::format("{}: a residual in the output's layout", op));
}

BatchNormArguments arguments(const Variable& x, const Variable& gamma, const Variable& beta,
                             const Variable& residual, const BatchNormState& state,
                             const BatchNormOptions& options) {
  return {x.value(), gamma.value(), beta.value(), residual.defined() ? residual.value() : Tensor(),
          state,     options};
}

BatchNormGradients gradients(const Variable& x, const Variable& gamma, const Variable& beta,
                             const Variable& residual) {
  return {gamma.gradient_target(), beta.gradient_target(), x.input_gradient(), residual.requires_grad(), {}};
}

void hand_on(BatchNormGradients& from, const Variable& x, const Variable& residual) {
  x.accumulate_grad(std::move(from.x.tensor));
  if (from.want_residual) residual.accumulate_grad(std::move(from.residual));
}

}  // namespace

Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, const Variable& residual,
                    const BatchNormState& state, const BatchNormOptions& options) {
  check_shapes("batch_norm", x.shape(), x.value().layout(), gamma, beta, residual);
  const auto& kernels = kernels_for<BatchNormKernels>(x);
  const BatchNormArguments call = arguments(x, gamma, beta, residual, state, options);
  OpState kept;
  Tensor y = kernels.forward(call, kept);
  std::vector<Variable> inputs{x, gamma, beta};
  if (residual.defined()) inputs.push_back(residual);
  return {"batch_norm", std::move(y), std::move(inputs), [=, &kernels](Tensor grad) {
            BatchNormGradients out = gradients(x, gamma, beta, residual);
            kernels.backward(call, kept, std::move(grad), out);
            hand_on(out, x, residual);
          }};
}

Variable conv_bn(const Variable& x, const Variable& weight, const Variable& gamma, const Variable& beta,
                 const Variable& residual, const ConvGeometry& geometry, const BatchNormState& state,
                 const BatchNormOptions& options) {
  const ConvBnKernels* kernels = find_kernels<ConvBnKernels>(x);
  if (!kernels) return batch_norm(conv2d(x, weight, {}, geometry), gamma, beta, residual, state, options);
  check_shapes("conv_bn", geometry.output_shape(x.shape()),
               kernels_for<ConvKernels>(x).output_layout(geometry), gamma, beta, residual);
  TOPKNOT_CHECK(weight.shape() == geometry.weight_shape(), "conv_bn: weight " + weight.shape().str());
  const BatchNormArguments call = arguments(x, gamma, beta, residual, state, options);
  OpState kept;
  PassCost::add_flops(geometry.flops(x.shape()));
  Tensor y = kernels->forward(geometry, weight.value(), call, kept);
  std::vector<Variable> inputs{x, weight, gamma, beta};
  if (residual.defined()) inputs.push_back(residual);
  return {"conv_bn", std::move(y), std::move(inputs), [=](Tensor grad) {
            BatchNormGradients out = gradients(x, gamma, beta, residual);
            PassCost::add_flops(geometry.flops(x.shape()) * (weight.requires_grad() + x.requires_grad()));
            kernels->backward(geometry, weight.value(), call, kept, std::move(grad), weight.gradient_target(),
                              out);
            hand_on(out, x, residual);
          }};
}

}  // namespace topknot
