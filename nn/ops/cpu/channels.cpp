#include "nn/ops/cpu/channels.h"

#include <vector>

#include "nn/ops/layout.h"

namespace topknot {

void add_channel_bias(Tensor& y, const float* bias, std::int64_t begin, std::int64_t end) {
  const ChannelGeometry g(y);
  float* p = y.data() + begin * g.image_floats();
  for (std::int64_t n = begin; n < end; ++n)
    for (std::int64_t c = 0; c < g.channels; c += g.block)
      for (std::int64_t i = 0; i < g.pixels; ++i)
        for (int k = 0; k < g.block; ++k) *p++ += bias[c + k];
}

Tensor sum_over_channels(const Tensor& x) {
  const ChannelGeometry g(x);
  std::vector<float> sums(static_cast<std::size_t>(g.images * g.channels));
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const float* p = x.data() + n * g.image_floats();
      for (std::int64_t c = 0; c < g.channels; c += g.block)
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k) sums[static_cast<std::size_t>(n * g.channels + c + k)] += *p++;
    }
  });
  Tensor total = Tensor::empty({g.channels});
  for (std::int64_t c = 0; c < g.channels; ++c) {
    double sum = 0;
    for (std::int64_t n = 0; n < g.images; ++n) sum += sums[static_cast<std::size_t>(n * g.channels + c)];
    total.data()[c] = static_cast<float>(sum);
  }
  return total;
}

namespace {

Tensor convert(const Tensor& x, Layout layout, DType type) {
  TOPKNOT_CHECK(type == DType::f32, "activations on a CPU are fp32");
  Tensor y = Tensor::empty(x.shape(), layout);
  const ChannelGeometry from(x), to(y);
  const int block = std::max(from.block, to.block);
  const bool packing = to.block > 1;
  parallel_ranges(from.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const float* in = x.data() + n * from.image_floats();
      float* out = y.data() + n * from.image_floats();
      for (std::int64_t c = 0; c < from.channels; c += block)
        for (std::int64_t i = 0; i < from.pixels; ++i)
          for (int k = 0; k < block; ++k) {
            const std::int64_t plain = (c + k) * from.pixels + i, blocked = (c * from.pixels) + i * block + k;
            out[packing ? blocked : plain] = in[packing ? plain : blocked];
          }
    }
  });
  return y;
}

const RegisterKernels<LayoutKernels> channels_registered(DeviceKind::cpu, {.convert = convert});

}  // namespace

}  // namespace topknot
