#pragma once
// Winograd's F(4x4, 3x3) (Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016, section 4): a 3x3
// convolution of stride 1 and padding 1 makes a tile of 4x4 outputs from 6x6 inputs with 36 products for each pair of
// channels instead of 144.
//
//   y = A^T [sum_c (G w G^T) * (B^T x B)] A,   dw = G^T [sum over tiles (A dy A^T) * (B^T x B)] G,   * elementwise,
//
// and dx is y's formula for dy and the weights turned by 180 degrees. Arithmetic is f32, whatever the activations' type.

#include "nn/ops/cpu/conv2d.h"

namespace topknot {

class WinogradConv {
 public:
  using ChunkFn = ChunkedConv::ChunkFn;
  using FillFn = ChunkedConv::FillFn;
  explicit WinogradConv(const ConvGeometry& geometry) : g_(geometry) {}

  // Whether this is the faster way for the layer and a batch of this size and type.
  bool serves(const Tensor& x) const;
  // As ChunkedConv's, of blocked activations.
  void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const;
  void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                GradientTarget weight_gradient, InputGradient& input_gradient) const;

 private:
  // Up to here a thread works through images of its own; above, and where there are fewer images than threads, all
  // threads share the products of a few tiles, so that the transformed weights, 144 bytes for each pair of channels, pass
  // through the caches once.
  static constexpr std::int64_t kNarrow = 256 * 256;
  bool shared(const Tensor& x) const;
  Tensor weight_points(const float* weight, bool input_gradient) const;

  ConvGeometry g_;
};

}  // namespace topknot
