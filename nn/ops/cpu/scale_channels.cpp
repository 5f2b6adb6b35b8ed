#include "nn/ops/scale_channels.h"

#include "nn/ops/cpu/channels.h"

namespace topknot {
namespace {

template <class T>
void scale_stored(const Tensor& x, const Tensor& s, Tensor& y) {
  const ChannelGeometry g(x);
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const T *in = g.image<T>(x, n), *scale = s.as<T>() + n * g.channels;
      T* out = g.image<T>(y, n);
      for (std::int64_t c = 0; c < g.channels; c += g.block)
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k) narrow(widened(*in++) * widened(scale[c + k]), *out++);
    }
  });
}
void scale_forward(const Tensor& x, const Tensor& s, Tensor& y) {
  by_type(x.dtype(), [&](auto type) { scale_stored<decltype(type)>(x, s, y); });
}

template <class T>
void scale_gradient_stored(const Tensor& x, const Tensor& dy, Tensor& ds) {
  const ChannelGeometry g(x);
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const T *in = g.image<T>(x, n), *grad = g.image<T>(dy, n);
      T* out = ds.as<T>() + n * g.channels;
      for (std::int64_t c = 0; c < g.channels; c += g.block, out += g.block) {
        float sums[kWidestBlock] = {};
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k) sums[k] += widened(*grad++) * widened(*in++);
        for (int k = 0; k < g.block; ++k) narrow(sums[k], out[k]);
      }
    }
  });
}
void scale_gradient(const Tensor& x, const Tensor& dy, Tensor& ds) {
  by_type(x.dtype(), [&](auto type) { scale_gradient_stored<decltype(type)>(x, dy, ds); });
}

const RegisterKernels<ScaleChannelsKernels> scale_channels_registered(DeviceKind::cpu,
                                                                      {.forward = scale_forward,
                                                                       .scale_gradient = scale_gradient});

}  // namespace
}  // namespace topknot
