#pragma once
// Two-dimensional convolution (cross-correlation, as in every deep-learning library), square kernel, zero
// padding.
//
//   y[n,o,i,j] = b[o] + sum_{c,p,q} w[o,c,p,q] x[n,c, i*stride + p - padding, j*stride + q - padding]

#include <functional>
#include <memory>

#include "nn/core/autograd.h"

namespace topknot {

struct ConvGeometry {
  std::int64_t in = 0, out = 0;  // channels
  std::int64_t kernel = 3, stride = 1, padding = 1;

  std::int64_t output_size(std::int64_t size) const { return (size + 2 * padding - kernel) / stride + 1; }
  Shape weight_shape() const { return {out, in, kernel, kernel}; }
  Shape output_shape(const Shape& x) const { return {x[0], out, output_size(x[2]), output_size(x[3])}; }
};

// A layer's prepared kernels; a backend's affair. Work is done in chunks of images that fit the cache, so
// that what is computed beside the convolution (batch norm's sums) finds its data there.
class ConvKernels {
 public:
  // Called for each chunk [begin, end) of images, from the thread that works on it.
  using ChunkFn = std::function<void(std::int64_t begin, std::int64_t end)>;
  // Writes the gradient of the output for images [begin, end) to `out`, contiguous.
  using FillFn = std::function<void(std::int64_t begin, std::int64_t end, float* out)>;

  virtual ~ConvKernels() = default;
  virtual Layout output_layout() const = 0;
  // y = conv(x, weight). `weight` is OIHW. `after` (may be empty) runs once a chunk of y is there.
  virtual void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) = 0;
  // Gradients from the output's gradient, which is `grad`, or comes from `fill` a chunk at a time where grad
  // is undefined. `input_gradient` may be null.
  virtual void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                        GradientTarget weight_gradient, InputGradient& input_gradient) = 0;
};

std::shared_ptr<ConvKernels> make_conv_kernels(const ConvGeometry& geometry, Device device = {});
std::shared_ptr<ConvKernels> make_conv_kernels_cpu(const ConvGeometry& geometry);

// x: [N, in, H, W]; weight: OIHW; bias: [out] or undefined. The kernels are the layer's own and outlive the
// graph.
Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias, const ConvGeometry& geometry,
                const std::shared_ptr<ConvKernels>& kernels);

}  // namespace topknot
