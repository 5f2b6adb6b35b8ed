#pragma once
// Two-dimensional convolution (cross-correlation, as in every deep-learning library), square kernel, zero
// padding.
//
//   y[n,o,i,j] = b[o] + sum_{c,p,q} w[o,c,p,q] x[n,c, i*stride + p - padding, j*stride + q - padding]

#include "nn/ops/kernels.h"

namespace topknot {

struct ConvGeometry {
  std::int64_t in = 0, out = 0;  // channels
  std::int64_t kernel = 3, stride = 1, padding = 1;

  std::int64_t output_size(std::int64_t size) const { return (size + 2 * padding - kernel) / stride + 1; }
  Shape weight_shape() const { return {out, in, kernel, kernel}; }
  // Throws Error where the geometry is invalid, x is not [N, in, H, W], or the kernel is larger than the padded x.
  Shape output_shape(const Shape& x) const;
  // Of y, and of each of the gradients of x and w: 2 per multiply-add, those with padding included.
  double flops(const Shape& x) const;
  auto operator<=>(const ConvGeometry&) const = default;
};

// x: [N, in, H, W]; weight: OIHW; bias: [out] or undefined.
Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias,
                const ConvGeometry& geometry);

struct ConvKernels {
  static constexpr const char* op = "conv2d";
  Layout (*output_layout)(const ConvGeometry& geometry);
  OpState (*forward)(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& bias,
                     Tensor& y);
  // dw[o,c,p,q] = sum_{n,i,j} dy[n,o,i,j] x[n,c,i*s+p-pad,j*s+q-pad];  dx = the transposed convolution of dy;
  // db[o] = sum_{n,i,j} dy[n,o,i,j]
  void (*backward)(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& dy,
                   const OpState& state, WeightedGradients& out);
};

}  // namespace topknot
