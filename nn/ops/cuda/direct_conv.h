#pragma once
// A convolution by its definition, for any channels, groups, strides and padding: what cuDNN does not do. One thread sums one element in fp32, in a fixed order, without atomics: the same bits in
// every run. Activations are nhwc, f32 or bf16; all work goes to the current context's stream.

#include "nn/ops/kernels.h"

namespace topknot::cuda {

// The arena's weight in the order [in / groups, height, width, out] and the type of x.
Tensor direct_conv_filter(const ConvGeometry& geometry, const Tensor& weight, DType type);

// Throw Error for activations of 2^32 elements and more.
void direct_conv(const ConvGeometry& geometry, const Tensor& x, const Tensor& filter, Tensor& y);
void direct_conv_input_gradient(const ConvGeometry& geometry, const Tensor& filter, const Tensor& dy,
                                InputGradient& dx);
// dw in the arena's order, not rounded.
void direct_conv_weight_gradient(const ConvGeometry& geometry, const Tensor& x, const Tensor& dy,
                                 const GradientTarget& dw);

}  // namespace topknot::cuda
