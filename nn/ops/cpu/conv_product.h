#pragma once
// Layers of large weights on few pixels as matrix products: the columns of an output pixel are the inputs that it reads, in the
// order of the weights, so that these, OIHW, are read and their gradient is written as they lie. oneDNN's convolutions would
// first put the weights in an order of their own, which takes longer than the products.
//
//   y = X W^T,   dW = dY^T X,   dX = dY W,   X: [output pixels, in * taps], W: [out, in * taps], Y: [output pixels, out]

#include "nn/ops/cpu/conv2d.h"

namespace topknot {

class ProductConv {
 public:
  using ChunkFn = ChunkedConv::ChunkFn;
  using FillFn = ChunkedConv::FillFn;
  explicit ProductConv(const ConvGeometry& geometry) : g_(geometry) {}

  // Whether this is the faster way for the layer and a batch of this size, type and layout.
  bool serves(const Tensor& x) const;
  // As ChunkedConv's.
  void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const;
  void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                GradientTarget weight_gradient, InputGradient& input_gradient) const;

 private:
  ConvGeometry g_;
};

}  // namespace topknot
