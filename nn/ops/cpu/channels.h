#pragma once
// An activation seen as images of channels: what the per-channel kernels share. A pixel's `block` channels
// lie side by side (block 1 for plain tensors).

#include "nn/core/base/check.h"
#include "nn/core/tensor.h"

namespace topknot {

struct ChannelGeometry {
  std::int64_t images, channels, pixels;  // pixels = H * W
  int block;

  explicit ChannelGeometry(const Tensor& x)
      : images(x.dim(0)),
        channels(x.dim(1)),
        pixels(x.dim(2) * x.dim(3)),
        block(x.layout() == Layout::blocked ? channel_block() : 1) {}
  std::int64_t image_floats() const { return channels * pixels; }
};

// y[n,c,...] += bias[c] for images [begin, end).
void add_channel_bias(Tensor& y, const float* bias, std::int64_t begin, std::int64_t end);
// s[c] = sum over n, i, j of x[n,c,i,j]; added in image order, the same for any thread count.
Tensor sum_over_channels(const Tensor& x);

}  // namespace topknot
