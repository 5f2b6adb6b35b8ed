#pragma once
// What oneDNN is given in place of a convolution: its fast kernels want channels in whole blocks.

#include <algorithm>
#include <numeric>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

// The layer: its groups have channels in whole blocks. Channels are added, with weights of zero (24, 40, 58), or groups joined,
// with zeros between them (8 channels each). Where groups do not fit so, and without AVX-512 where the padding is wider than
// its AVX2 kernels allow, it is the given layer with plain activations: oneDNN has products of columns for these, and for blocked
// ones only its reference implementation. Images of up to three channels are read as they are.
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
  template <class Fn>
  void for_each_row(const Fn& fn) const {
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
  // `from` itself where nothing is to be done, else the copy, kept alive by `storage`.
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
