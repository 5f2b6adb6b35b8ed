#include "nn/ops/scale_channels.h"

#include "nn/ops/cpu/channels.h"

namespace topknot {
namespace {

void scale_forward(const Tensor& x, const Tensor& s, Tensor& y) {
  const ChannelGeometry g(x);
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const float *in = x.data() + n * g.image_floats(), *scale = s.data() + n * g.channels;
      float* out = y.data() + n * g.image_floats();
      for (std::int64_t c = 0; c < g.channels; c += g.block)
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k) *out++ = *in++ * scale[c + k];
    }
  });
}

void scale_gradient(const Tensor& x, const Tensor& dy, Tensor& ds) {
  const ChannelGeometry g(x);
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const float *in = x.data() + n * g.image_floats(), *grad = dy.data() + n * g.image_floats();
      float* sum = ds.data() + n * g.channels;
      for (std::int64_t c = 0; c < g.channels; c += g.block, sum += g.block) {
        std::fill(sum, sum + g.block, 0.0f);
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k) sum[k] += *grad++ * *in++;
      }
    }
  });
}

const RegisterKernels<ScaleChannelsKernels> scale_channels_registered(DeviceKind::cpu,
                                                                      {.forward = scale_forward,
                                                                       .scale_gradient = scale_gradient});

}  // namespace
}  // namespace topknot
