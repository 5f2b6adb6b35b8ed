#pragma once
// Two-dimensional convolution (cross-correlation, as in every deep-learning library) with zero padding, in groups: output
// channel o of group g = o / (out / groups) reads the in / groups input channels from g in / groups on.
//
//   y[n,o,i,j] = b[o] + sum_{c,p,q} w[o,c,p,q] x[n, g in / groups + c, i*stride + p - padding, j*stride + q - padding]
//
// with the stride and padding of either direction. groups = in = out is the depthwise convolution.

#include "nn/ops/kernels.h"

namespace topknot {

// Along the two sides of an image; one number stands for both.
struct Extent {
  std::int64_t height, width;
  constexpr Extent(std::int64_t both) : height(both), width(both) {}
  constexpr Extent(std::int64_t height_, std::int64_t width_) : height(height_), width(width_) {}
  auto operator<=>(const Extent&) const = default;
};

struct ConvGeometry {
  std::int64_t in = 0, out = 0;  // channels
  Extent kernel = 3, stride = 1, padding = 1;
  std::int64_t groups = 1;  // divides in and out

  Shape weight_shape() const { return {out, in / groups, kernel.height, kernel.width}; }
  bool depthwise() const { return groups > 1 && groups == in && groups == out; }
  // Throws Error where the geometry is invalid, x is not [N, in, H, W], or the kernel is larger than the padded x.
  Shape output_shape(const Shape& x) const;
  // Of y, and of each of the gradients of x and w: 2 per multiply-add, those with padding included.
  double flops(const Shape& x) const;
  auto operator<=>(const ConvGeometry&) const = default;
};

// x: [N, in, H, W]; weight: OIHW, of weight_shape(); bias: [out] or undefined.
Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias,
                const ConvGeometry& geometry);

struct ConvKernels {
  static constexpr const char* op = "conv2d";
  static constexpr bool cpu_bfloat16 = true;
  Layout (*output_layout)(const ConvGeometry& geometry);
  OpState (*forward)(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& bias,
                     Tensor& y);
  // dw[o,c,p,q] = sum_{n,i,j} dy[n,o,i,j] x[n, g in / groups + c, i*s+p-pad, j*s+q-pad];
  // dx = the transposed convolution of dy;  db[o] = sum_{n,i,j} dy[n,o,i,j]
  void (*backward)(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& dy,
                   const OpState& state, WeightedGradients& out);
};

}  // namespace topknot
