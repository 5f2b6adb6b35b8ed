#pragma once
// The bias of a convolution or linear layer on a GPU. The channel is the fastest dimension of y in memory: nhwc, or
// [N, out].

#include "nn/core/autograd.h"

namespace topknot::cuda {

void add_bias(Tensor& y, const Variable& bias);
// Writes the sum of the output's gradient over all but the channel into the bias' gradient.
void bias_gradient(const Tensor& grad, const Variable& bias);

}  // namespace topknot::cuda
