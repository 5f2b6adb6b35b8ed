#pragma once
// Batch normalisation over N, H, W (Ioffe and Szegedy, 2015), with what usually follows it fused in:
//
//   y = relu(gamma (x - mean) / sqrt(var + eps) + beta + residual)
//
// mean and var are the batch's in training (var biased), the running ones otherwise. The running variance
// takes the unbiased batch variance, as PyTorch's does.

#include <vector>

#include "nn/core/autograd.h"
#include "nn/core/parameter.h"
#include "nn/ops/conv2d.h"

namespace topknot {

// A layer's running statistics; [C] each.
struct BatchNormState {
  std::vector<float>*mean = nullptr, *variance = nullptr;
  float momentum = 0.1f;  // weight of the new batch
  float epsilon = 1e-5f;
  const Buffer *mean_buffer = nullptr, *variance_buffer = nullptr;  // the same, for their memory on a GPU
};

struct BatchNormOptions {
  bool training = true;
  bool relu = false;
};

// x: [N, C, H, W]; gamma, beta: [C]; residual: as x in shape and layout, or undefined.
Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, const Variable& residual,
                    const BatchNormState& state, const BatchNormOptions& options);

// batch_norm(conv2d(x)), worked through a chunk of images at a time: the statistics are summed while the
// convolution's output is in the cache, and the gradient that goes back into the convolution never leaves it.
Variable conv_bn(const Variable& x, const Variable& weight, const Variable& gamma, const Variable& beta,
                 const Variable& residual, const ConvGeometry& geometry,
                 const std::shared_ptr<ConvKernels>& kernels, const BatchNormState& state,
                 const BatchNormOptions& options);

}  // namespace topknot
