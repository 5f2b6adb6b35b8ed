#pragma once
// Convolutions on CPUs, and the ways in which they are computed; nn/ops/cpu/conv2d.cpp chooses one for a layer and a batch.

#include <functional>

#include "nn/ops/kernels.h"

namespace topknot {

// A convolution that lets its neighbours work where the data is in the cache: it goes through a batch in chunks
// of images.
class ChunkedConv {
 public:
  // Called for each chunk [begin, end) of images, from the thread that works on it.
  using ChunkFn = std::function<void(std::int64_t begin, std::int64_t end)>;
  // Writes the gradient of the output for images [begin, end) to `out`, contiguous, in the type of the activations.
  using FillFn = std::function<void(std::int64_t begin, std::int64_t end, void* out)>;

  virtual ~ChunkedConv() = default;
  virtual Layout output_layout() const = 0;
  // y = conv(x, weight). `weight` is OIHW. `after` (may be empty) runs for each chunk of y when it is complete.
  virtual void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) = 0;
  // Gradients from the output's gradient, which is `grad`, or comes from `fill` a chunk at a time where grad is
  // undefined. The tensor of `input_gradient` may be undefined.
  virtual void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                        GradientTarget weight_gradient, InputGradient& input_gradient) = 0;
};

// The calling thread's, with its primitives prepared by shape and thread count; layers of one geometry share them.
ChunkedConv& chunked_conv(const ConvGeometry& geometry);

// Images per chunk: about 1 MiB of input and output, at least one.
std::int64_t images_per_chunk(const ConvGeometry& geometry, const Tensor& x);

// 1x1 convolutions of stride 1 whose channels do not fill blocks: on plain activations each image is one matrix product, without
// the copies and the channels of zeros that blocks need.
//
//   y = W x,   dx = W^T dy,   dW = sum over images of dy x^T,   x: [in, pixels], y: [out, pixels]
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

// Layers of large weights on few pixels as matrix products: the columns of an output pixel are the inputs that it reads, in the
// order of the weights, so that these, OIHW, are read and their gradient is written as they lie. oneDNN's convolutions would
// first put the weights in an order of their own, which takes longer than the products.
//
//   y = X W^T,   dW = dY^T X,   dX = dY W,   X: [output pixels, in * taps], W: [out, in * taps], Y: [output pixels, out]
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

// Winograd's F(4x4, 3x3) (Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016, section 4): a 3x3
// convolution of stride 1 and padding 1 makes a tile of 4x4 outputs from 6x6 inputs with 36 products for each pair of
// channels instead of 144.
//
//   y = A^T [sum_c (G w G^T) * (B^T x B)] A,   dw = G^T [sum over tiles (A dy A^T) * (B^T x B)] G,   * elementwise,
//
// and dx is y's formula for dy and the weights turned by 180 degrees. Arithmetic is f32, whatever the activations' type.
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

// The depthwise convolution's gradient where oneDNN has no kernel of its own for it: kernels that are not 3 wide.
//
// dw[c,0,p,q] = sum_{n,i,j} dy[n,c,i,j] x[n,c,i*s+p-pad,j*s+q-pad], in the calling thread. `shape` is x's; x and dy are
// blocked, with channels padded to whole blocks.
void depthwise_weight_gradient(const ConvGeometry& g, const Shape& shape, const float* x, const float* dy,
                               float* dw);

}  // namespace topknot
