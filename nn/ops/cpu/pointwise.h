#pragma once
// 1x1 convolutions of stride 1 whose channels do not fill blocks: on plain activations each image is one matrix product, without
// the copies and the channels of zeros that blocks need.
//
//   y = W x,   dx = W^T dy,   dW = sum over images of dy x^T,   x: [in, pixels], y: [out, pixels]

#include "nn/ops/cpu/conv2d.h"

namespace topknot {

class PointwiseConv {
 public:
  using ChunkFn = ChunkedConv::ChunkFn;
  using FillFn = ChunkedConv::FillFn;
  explicit PointwiseConv(const ConvGeometry& geometry) : g_(geometry) {}

  // Whether this is the faster way for the layer, whose outputs are to be plain, and a batch of this size, type and layout. A batch of
  // fewer images than threads goes another way, so these layers' values may differ in the last bits between numbers of threads.
  bool serves(const Tensor& x) const;
  // As ChunkedConv's.
  void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const;
  void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                GradientTarget weight_gradient, InputGradient& input_gradient) const;

 private:
  ConvGeometry g_;
};

}  // namespace topknot
