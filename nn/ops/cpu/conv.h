#pragma once
// Convolutions on CPUs in several ways, of which nn/ops/conv2d.cpp chooses one for a layer and a batch.

#include <algorithm>
#include <functional>
#include <numeric>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

// A convolution in chunks of images, so that its neighbours work while the data is in the cache.
class ChunkedConv {
 public:
  // Called for each chunk [begin, end) of images, from the thread that works on it.
  using ChunkFn = std::function<void(std::int64_t begin, std::int64_t end)>;
  // Writes the output's gradient for images [begin, end) to `out`, contiguous, in the activations' type.
  using FillFn = std::function<void(std::int64_t begin, std::int64_t end, void* out)>;

  virtual ~ChunkedConv() = default;
  virtual Layout output_layout() const = 0;
  // y = conv(x, weight). `weight` is OIHW. `after` (may be empty) runs for each complete chunk of y.
  virtual void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) = 0;
  // Gradients from the output's gradient, which is `grad`, or comes from `fill` a chunk at a time if grad is
  // undefined. The tensor of `input_gradient` may be undefined.
  virtual void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                        GradientTarget weight_gradient, InputGradient& input_gradient) = 0;
};

// The calling thread's, with primitives prepared by shape and thread count; shared by layers of a geometry.
ChunkedConv& chunked_conv(const ConvGeometry& geometry);

// Images per chunk: about 1 MiB of input and output, at least one.
std::int64_t images_per_chunk(const ConvGeometry& geometry, const Tensor& x);

// 1x1 convolutions of stride 1 whose channels do not fill blocks: on plain activations each image is one
// matrix product, without the copies and the channels of zeros that blocks need.
//
//   y = W x,   dx = W^T dy,   dW = sum over images of dy x^T,   x: [in, pixels], y: [out, pixels]
class PointwiseConv {
 public:
  using ChunkFn = ChunkedConv::ChunkFn;
  using FillFn = ChunkedConv::FillFn;
  explicit PointwiseConv(const ConvGeometry& geometry) : g_(geometry) {}

  // Whether this is the faster way for the layer, whose outputs are to be plain, and a batch of this size,
  // type and layout. A batch of fewer images than threads goes another way, so these layers' values may
  // differ in the last bits between numbers of threads.
  bool serves(const Tensor& x) const;
  // The same as ChunkedConv's.
  void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const;
  void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                GradientTarget weight_gradient, InputGradient& input_gradient) const;

 private:
  ConvGeometry g_;
};

// Layers of large weights on few pixels as matrix products: the columns of an output pixel are the inputs
// that it reads, in the order of the weights, so that these, OIHW, are read and their gradient is written as
// they lie. oneDNN's convolutions would first reorder the weights, which takes longer than the products.
//
//   y = X W^T,   dW = dY^T X,   dX = dY W,   X: [output pixels, in * taps], W: [out, in * taps], Y: [output pixels, out]
class ProductConv {
 public:
  using ChunkFn = ChunkedConv::ChunkFn;
  using FillFn = ChunkedConv::FillFn;
  explicit ProductConv(const ConvGeometry& geometry) : g_(geometry) {}

  // Whether this is the faster way for the layer and a batch of this size, type and layout.
  bool serves(const Tensor& x) const;
  // The same as ChunkedConv's.
  void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const;
  void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                GradientTarget weight_gradient, InputGradient& input_gradient) const;

 private:
  ConvGeometry g_;
};

// Winograd's F(4x4, 3x3) (Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016, section
// 4): a 3x3 convolution of stride 1 and padding 1 makes a tile of 4x4 outputs from 6x6 inputs with 36
// products for each pair of channels instead of 144.
//
//   y = A^T [sum_c (G w G^T) * (B^T x B)] A,   dw = G^T [sum over tiles (A dy A^T) * (B^T x B)] G,   * elementwise,
//
// and dx is y's formula for dy and the weights turned by 180 degrees. Arithmetic is f32 for all types.
class WinogradConv {
 public:
  using ChunkFn = ChunkedConv::ChunkFn;
  using FillFn = ChunkedConv::FillFn;
  explicit WinogradConv(const ConvGeometry& geometry) : g_(geometry) {}

  // Whether this is the faster way for the layer and a batch of this size and type.
  bool serves(const Tensor& x) const;
  // The same as ChunkedConv's, for blocked activations.
  void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) const;
  void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                GradientTarget weight_gradient, InputGradient& input_gradient) const;

 private:
  // Up to here a thread works through images of its own; above, and if there are fewer images than threads,
  // all threads share the products of a few tiles, so that the transformed weights, 144 bytes for each pair
  // of channels, pass through the caches once.
  static constexpr std::int64_t kNarrow = 256 * 256;
  bool shared(const Tensor& x) const;
  Tensor weight_points(const float* weight, bool input_gradient) const;

  ConvGeometry g_;
};

// The depthwise convolution's gradient if oneDNN has no own kernel: kernels that are not 3 wide.
//
// dw[c,0,p,q] = sum_{n,i,j} dy[n,c,i,j] x[n,c,i*s+p-pad,j*s+q-pad], in the calling thread. `shape` is x's; x
// and dy are blocked, with channels padded to whole blocks.
void depthwise_weight_gradient(const ConvGeometry& g, const Shape& shape, const float* x, const float* dy,
                               float* dw);

// The convolution that oneDNN gets in place of a layer, because its fast kernels want channels in whole
// blocks. Channels are added, with weights of zero (24, 40, 58), or groups joined, with zeros between them (8
// channels each). If groups do not fit so, and without AVX-512 if the padding is wider than its AVX2 kernels
// allow, it is the given layer with plain activations: oneDNN has products of columns for these, and for
// blocked ones only its reference implementation. Images of up to three channels are read as they are.
class PaddedConv {
 public:
  explicit PaddedConv(const ConvGeometry& layer) : g(layer), layer_(layer) {
    const std::int64_t block = channel_block();
    const auto whole = [&](std::int64_t channels) { return (channels + block - 1) / block * block; };
    const bool image = layer.groups == 1 && layer.in <= 3;
    if (layer.depthwise()) {
      g.in = g.out = g.groups = whole(layer.in);
    } else if (block == 8 && layer.padding.width > kWidestAvx2Padding) {
      blocked = false;
    } else if (layer.groups == 1) {
      if (!image) g.in = whole(layer.in);
      g.out = whole(layer.out);
    } else {
      const std::int64_t both = std::gcd(layer.in / layer.groups, layer.out / layer.groups);
      joined_ = block / std::gcd(both, block);
      if (layer.groups % joined_ != 0) joined_ = 1, blocked = false;
      g.groups = layer.groups / joined_;
    }
    in = blocked && !image ? Layout::blocked : Layout::plain;
    out = blocked ? Layout::blocked : Layout::plain;
  }

  // The given layer with plain activations, which oneDNN computes in any geometry as products of columns.
  static PaddedConv plain(const ConvGeometry& layer) {
    PaddedConv inside(layer);
    inside.g = layer, inside.joined_ = 1, inside.blocked = false, inside.in = inside.out = Layout::plain;
    return inside;
  }

  ConvGeometry g;
  bool blocked = true;
  Layout in, out;  // of its activations

  // Its weights, OIHW, from the layer's.
  const float* weights(const float* layers, Tensor& storage) const {
    if (same()) return layers;
    storage = Tensor::zeros(g.weight_shape());
    for_each_row([&](std::int64_t from, std::int64_t to, std::int64_t count) {
      std::copy_n(layers + from, count, storage.data() + to);
    });
    return storage.data();
  }
  // The layer's gradient from that of its weights, OIHW.
  void gradient(const float* from, GradientTarget target) const {
    for_each_row([&](std::int64_t at, std::int64_t inside, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i)
        target.data[at + i] = target.accumulate ? target.data[at + i] + from[inside + i] : from[inside + i];
    });
  }
  bool same() const { return g == layer_; }

 private:
  static constexpr std::int64_t kWidestAvx2Padding = 3;  // columns that such a kernel computes at once

  // fn(where an output's weights begin in the layer's, where they begin here, how many)
  void for_each_row(const auto& fn) const {
    const std::int64_t taps = g.kernel.height * g.kernel.width, per_group = layer_.out / layer_.groups,
                       count = layer_.in / layer_.groups * taps, row = g.in / g.groups * taps;
    for (std::int64_t o = 0; o < layer_.out; ++o)
      fn(o * count, o * row + o / per_group % joined_ * count, count);
  }

  ConvGeometry layer_;
  std::int64_t joined_ = 1;  // groups of the layer in one group here
};

// Copies the activations of one side of a layer from their layout outside to that inside, and back.
struct Packing {
  Layout outside, inside;
  DType type;
  std::int64_t channels, padded, pixels;  // padded: channels inside
  bool parallel;                          // over the images

  bool none() const { return outside == inside; }
  void in(std::int64_t images, const void* from, void* to) const { copy(images, true, from, to); }
  void out(std::int64_t images, const void* from, void* to) const { copy(images, false, from, to); }
  // `from` itself if nothing is to be done, else the copy, kept alive by `storage`.
  const void* in(std::int64_t images, const void* from, Tensor& storage) const {
    if (none()) return from;
    in(images, from, room(images, storage));
    return storage.as<std::byte>();
  }
  // Memory for what is inside.
  void* room(std::int64_t images, Tensor& storage) const {
    if (!storage.defined()) storage = Tensor::empty({images, padded * pixels}, Layout::plain, {}, type);
    return storage.as<std::byte>();
  }

 private:
  void copy(std::int64_t images, bool inward, const void* from, void* to) const {
    const auto size = static_cast<std::int64_t>(size_of(type));
    const std::int64_t out_step = channels * pixels * size, in_step = padded * pixels * size;
    const auto work = [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        const auto* a = static_cast<const std::byte*>(from) + n * (inward ? out_step : in_step);
        auto* b = static_cast<std::byte*>(to) + n * (inward ? in_step : out_step);
        if ((inward ? inside : outside) == Layout::blocked)
          to_blocks(type, channels, pixels, a, b);
        else
          from_blocks(type, channels, pixels, a, b);
      }
    };
    if (parallel) return parallel_ranges(images, work);
    work(0, 0, images);
  }
};

}  // namespace topknot
