#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable scale_channels(const Variable& x, const Variable& s) {
  const Shape& shape = x.shape();
  TOPKNOT_CHECK(shape.rank() == 4 && s.shape() == Shape({shape[0], shape[1]}),
                "scale_channels: " + s.shape().str() + " for " + shape.str());
  const auto& kernels = kernels_for<ScaleChannelsKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  kernels.forward(x.value(), s.value(), y);
  return {"scale_channels", y, {x, s}, [=, &kernels](Tensor grad) {
            if (s.requires_grad()) {
              Tensor ds = Tensor::empty_like(s.value());
              kernels.scale_gradient(x.value(), grad, ds);
              s.accumulate_grad(std::move(ds));
            }
            if (!x.requires_grad()) return;
            Tensor dx = grad.exclusive() ? grad : Tensor::empty_like(grad);
            kernels.forward(grad, s.value(), dx);
            x.accumulate_grad(std::move(dx));
          }};
}

namespace {

template <class T>
void scale_stored(const Tensor& x, const Tensor& s, Tensor& y) {
  const ChannelGeometry g(x);
  parallel_each(g.images, [&](std::int64_t n) {
    const T *in = g.image<T>(x, n), *scale = s.as<T>() + n * g.channels;
    T* out = g.image<T>(y, n);
    for (std::int64_t c = 0; c < g.channels; c += g.block)
      for (std::int64_t i = 0; i < g.pixels; ++i)
        for (int k = 0; k < g.block; ++k) narrow(widened(*in++) * widened(scale[c + k]), *out++);
  });
}
void scale_forward(const Tensor& x, const Tensor& s, Tensor& y) {
  by_type(x.dtype(), [&](auto type) { scale_stored<decltype(type)>(x, s, y); });
}

template <class T>
void scale_gradient_stored(const Tensor& x, const Tensor& dy, Tensor& ds) {
  const ChannelGeometry g(x);
  parallel_each(g.images, [&](std::int64_t n) {
    const T *in = g.image<T>(x, n), *grad = g.image<T>(dy, n);
    T* out = ds.as<T>() + n * g.channels;
    for (std::int64_t c = 0; c < g.channels; c += g.block, out += g.block) {
      float sums[kWidestBlock] = {};
      for (std::int64_t i = 0; i < g.pixels; ++i)
        for (int k = 0; k < g.block; ++k) sums[k] += widened(*grad++) * widened(*in++);
      for (int k = 0; k < g.block; ++k) narrow(sums[k], out[k]);
    }
  });
}
void scale_gradient(const Tensor& x, const Tensor& dy, Tensor& ds) {
  by_type(x.dtype(), [&](auto type) { scale_gradient_stored<decltype(type)>(x, dy, ds); });
}

const bool scale_channels_registered =
    add_cpu_kernels<ScaleChannelsKernels>({.forward = scale_forward, .scale_gradient = scale_gradient});

}  // namespace
}  // namespace topknot
