#pragma once
// Batch normalisation over N, H, W (Ioffe and Szegedy, 2015), with what usually follows it fused in:
//
//   y = relu(gamma (x - mean) / sqrt(var + eps) + beta + residual)
//
// mean and var are the batch's in training (var biased), the running ones otherwise. The running variance
// takes the unbiased batch variance, as PyTorch's does.

#include "nn/core/parameter.h"
#include "nn/ops/conv2d.h"

namespace topknot {

// A layer's running statistics; [C] each.
struct BatchNormState {
  Buffer *mean = nullptr, *variance = nullptr;
  float momentum = 0.1f;  // weight of the new batch
  float epsilon = 1e-5f;
};

struct BatchNormOptions {
  bool training = true;
  bool relu = false;
};

// x: [N, C, H, W]; gamma, beta: [C]; residual: as x in shape and layout, or undefined.
Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, const Variable& residual,
                    const BatchNormState& state, const BatchNormOptions& options);

// batch_norm(conv2d(x)); residual: as the convolution's output in shape and layout, or undefined. A backend may fuse the
// two (ConvBnKernels).
Variable conv_bn(const Variable& x, const Variable& weight, const Variable& gamma, const Variable& beta,
                 const Variable& residual, const ConvGeometry& geometry, const BatchNormState& state,
                 const BatchNormOptions& options);

// One call as a backend sees it.
struct BatchNormArguments {
  Tensor x, gamma, beta, residual;  // residual: undefined where there is none
  BatchNormState state;
  BatchNormOptions options;
};

// Where the gradients go: filled by a backend.
struct BatchNormGradients {
  GradientTarget gamma, beta;  // data null: not wanted
  InputGradient x;             // undefined: not wanted
  bool want_residual = false;
  Tensor residual;  // out
};

// With xhat = (x - mean) / sqrt(var + eps), M = N H W and g the gradient where y > 0 (everywhere without relu):
//   dbeta = sum g,  dgamma = sum g xhat,  dresidual = g
//   dx = gamma / sqrt(var + eps) (g - dbeta / M - xhat dgamma / M)
// Outside training mean and var do not depend on x: only the first term of dx is left.
struct BatchNormKernels {
  static constexpr const char* op = "batch_norm";
  static constexpr bool cpu_bfloat16 = true;
  Tensor (*forward)(const BatchNormArguments& call, OpState& state);
  // `grad` may be written over where it is the caller's alone.
  void (*backward)(const BatchNormArguments& call, const OpState& state, Tensor grad,
                   BatchNormGradients& out);
};

// conv_bn in one piece. call.x is the input of the convolution, out.x its gradient.
struct ConvBnKernels {
  Tensor (*forward)(const ConvGeometry& geometry, const Tensor& weight, const BatchNormArguments& call,
                    OpState& state);
  void (*backward)(const ConvGeometry& geometry, const Tensor& weight, const BatchNormArguments& call,
                   const OpState& state, Tensor grad, GradientTarget weight_gradient,
                   BatchNormGradients& out);
};

}  // namespace topknot
