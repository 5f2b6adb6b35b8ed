#include <fmt/format.h>

#include <cmath>

#include "nn/core/pass_cost.h"
#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/conv.h"
#include "nn/ops/kernels.h"

namespace topknot {
namespace {

void check_shapes(const char* op, const Shape& x, Layout layout, const Variable& gamma, const Variable& beta,
                  const Variable& residual) {
  TOPKNOT_CHECK(x.rank() == 4, fmt::format("{}: input must be [N, C, H, W], not {}", op, x.str()));
  TOPKNOT_CHECK(gamma.shape() == Shape({x[1]}) && beta.shape() == Shape({x[1]}),
                fmt::format("{}: gamma and beta must have one value per channel of {}", op, x.str()));
  if (!residual.defined()) return;
  TOPKNOT_CHECK(residual.shape() == x,
                fmt::format("{}: residual {} for output {}", op, residual.shape().str(), x.str()));
  TOPKNOT_CHECK(residual.value().layout() == layout,
                fmt::format("{}: a residual in the output's layout", op));
}

BatchNormArguments arguments(const Variable& x, const Variable& gamma, const Variable& beta,
                             const Variable& residual, const BatchNormState& state,
                             const BatchNormOptions& options) {
  return {x.value(), gamma.value(), beta.value(), residual.defined() ? residual.value() : Tensor(),
          state,     options};
}

BatchNormGradients gradients(const Variable& x, const Variable& gamma, const Variable& beta,
                             const Variable& residual) {
  return {gamma.gradient_target(), beta.gradient_target(), x.input_gradient(), residual.requires_grad(), {}};
}

void hand_on(BatchNormGradients& from, const Variable& x, const Variable& residual) {
  x.accumulate_grad(std::move(from.x.tensor));
  if (from.want_residual) residual.accumulate_grad(std::move(from.residual));
}

}  // namespace

Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, const Variable& residual,
                    const BatchNormState& state, const BatchNormOptions& options) {
  check_shapes("batch_norm", x.shape(), x.value().layout(), gamma, beta, residual);
  const auto& kernels = kernels_for<BatchNormKernels>(x);
  const BatchNormArguments call = arguments(x, gamma, beta, residual, state, options);
  OpState kept;
  Tensor y = kernels.forward(call, kept);
  std::vector<Variable> inputs{x, gamma, beta};
  if (residual.defined()) inputs.push_back(residual);
  return {"batch_norm", std::move(y), std::move(inputs), [=, &kernels](Tensor grad) {
            BatchNormGradients out = gradients(x, gamma, beta, residual);
            kernels.backward(call, kept, std::move(grad), out);
            hand_on(out, x, residual);
          }};
}

Variable conv_bn(const Variable& x, const Variable& weight, const Variable& gamma, const Variable& beta,
                 const Variable& residual, const ConvGeometry& geometry, const BatchNormState& state,
                 const BatchNormOptions& options) {
  const ConvBnKernels* kernels = find_kernels<ConvBnKernels>(x);
  if (!kernels) return batch_norm(conv2d(x, weight, {}, geometry), gamma, beta, residual, state, options);
  check_shapes("conv_bn", geometry.output_shape(x.shape()),
               kernels_for<ConvKernels>(x).output_layout(geometry), gamma, beta, residual);
  TOPKNOT_CHECK(weight.shape() == geometry.weight_shape(), "conv_bn: weight " + weight.shape().str());
  const BatchNormArguments call = arguments(x, gamma, beta, residual, state, options);
  OpState kept;
  PassCost::add_flops(geometry.flops(x.shape()));
  Tensor y = kernels->forward(geometry, weight.value(), call, kept);
  std::vector<Variable> inputs{x, weight, gamma, beta};
  if (residual.defined()) inputs.push_back(residual);
  return {"conv_bn", std::move(y), std::move(inputs), [=](Tensor grad) {
            BatchNormGradients out = gradients(x, gamma, beta, residual);
            PassCost::add_flops(geometry.flops(x.shape()) * (weight.requires_grad() + x.requires_grad()));
            kernels->backward(geometry, weight.value(), call, kept, std::move(grad), weight.gradient_target(),
                              out);
            hand_on(out, x, residual);
          }};
}

namespace {

// On a CPU batch norm is alone or fused with the convolution before it (conv_bn): the batch statistics are
// summed while a chunk of the convolution's output is in the cache, and the gradient that enters the
// convolution is made a chunk at a time and never reaches memory.

// The following computes on one image. Per-channel arrays have one value per channel. Each loop is written
// once over a pixel's lanes V: 16 or 8 channels of a blocked tensor, one of a plain tensor. Several
// accumulators hide the latency of the additions; their order is fixed, so results do not depend on the CPU.

template <class V>
inline constexpr std::int64_t lanes = sizeof(V) / sizeof(float);

template <class V, class T>
TOPKNOT_INLINE void sums_of(const ChannelGeometry& g, const T* x, float* sums) {
  constexpr std::int64_t L = lanes<V>;
  const auto part = [&](std::int64_t eighths) __attribute__((always_inline)) {
    return load_as<V>(x + g.pixels * eighths / 8 * L);
  };
  for (std::int64_t c = 0; c < g.channels; c += L, x += g.pixels * L) {
    const V m = ((part(1) + part(3)) + (part(5) + part(7))) * 0.25f;
    V s0{}, s1{}, s2{}, s3{}, q0{}, q1{}, q2{}, q3{};
    std::int64_t i = 0;
    for (; i + 4 <= g.pixels; i += 4) {
      const V v0 = load_as<V>(x + i * L) - m, v1 = load_as<V>(x + (i + 1) * L) - m,
              v2 = load_as<V>(x + (i + 2) * L) - m, v3 = load_as<V>(x + (i + 3) * L) - m;
      s0 += v0, s1 += v1, s2 += v2, s3 += v3;
      q0 += v0 * v0, q1 += v1 * v1, q2 += v2 * v2, q3 += v3 * v3;
    }
    for (; i < g.pixels; ++i) {
      const V v = load_as<V>(x + i * L) - m;
      s0 += v, q0 += v * v;
    }
    store_as<V>(sums + c, m);
    store_as<V>(sums + g.channels + c, (s0 + s1) + (s2 + s3));
    store_as<V>(sums + 2 * g.channels + c, (q0 + q1) + (q2 + q3));
  }
}

template <class V, bool kResidual, bool kRelu, class T>
TOPKNOT_INLINE void apply_of(const ChannelGeometry& g, const T* x, const T* residual, T* y,
                             const float* scale, const float* shift) {
  constexpr std::int64_t L = lanes<V>;
  std::int64_t at = 0;
  for (std::int64_t c = 0; c < g.channels; c += L) {
    const V a = load_as<V>(scale + c), b = load_as<V>(shift + c), zero{};
    for (std::int64_t i = 0; i < g.pixels; ++i, at += L) {
      V v = a * load_as<V>(x + at) + b;
      if constexpr (kResidual) v += load_as<V>(residual + at);
      if constexpr (kRelu) v = v <= zero ? zero : v;  // so that NaN comes through
      store_as<V>(y + at, v);
    }
  }
}

template <class V, class T>
TOPKNOT_INLINE void apply_any(const ChannelGeometry& g, const T* x, const T* residual, T* y,
                              const float* scale, const float* shift, bool relu) {
  if (residual && relu) return apply_of<V, true, true>(g, x, residual, y, scale, shift);
  if (residual) return apply_of<V, true, false>(g, x, residual, y, scale, shift);
  if (relu) return apply_of<V, false, true>(g, x, residual, y, scale, shift);
  apply_of<V, false, false>(g, x, residual, y, scale, shift);
}

template <class V, bool kMask, class T>
TOPKNOT_INLINE void backward_sums_of(const ChannelGeometry& g, const T* grad, const T* y, const T* x,
                                     const float* mean, T* masked, float* sums) {
  constexpr std::int64_t L = lanes<V>;
  std::int64_t at = 0;
  for (std::int64_t c = 0; c < g.channels; c += L) {
    V s0{}, s1{}, q0{}, q1{};
    const V zero{}, m = load_as<V>(mean + c);
    const auto add = [&](std::int64_t i, V & s, V & q) __attribute__((always_inline)) {
      V d = load_as<V>(grad + i);
      if constexpr (kMask) {
        d = load_as<V>(y + i) <= zero ? zero : d;
        store_as<V>(masked + i, d);
      }
      s += d;
      q += d * (load_as<V>(x + i) - m);
    };
    std::int64_t i = 0;
    for (; i + 2 <= g.pixels; i += 2, at += 2 * L) {
      add(at, s0, q0);
      add(at + L, s1, q1);
    }
    for (; i < g.pixels; ++i, at += L) add(at, s0, q0);
    store_as<V>(sums + c, s0 + s1);
    store_as<V>(sums + g.channels + c, q0 + q1);
  }
}

template <class V, class T>
TOPKNOT_INLINE void backward_apply_of(const ChannelGeometry& g, const T* grad, const T* x, T* dx,
                                      const float* a, const float* b, const float* c) {
  constexpr std::int64_t L = lanes<V>;
  std::int64_t at = 0;
  for (std::int64_t channel = 0; channel < g.channels; channel += L) {
    const V va = load_as<V>(a + channel), vb = load_as<V>(b + channel), vc = load_as<V>(c + channel);
    for (std::int64_t i = 0; i < g.pixels; ++i, at += L)
      store_as<V>(dx + at, va * load_as<V>(grad + at) + (vb * load_as<V>(x + at) + vc));
  }
}

// Calls fn(Stored<V, T>()) with the lanes V of an image's pixels and the type T of its elements.
template <class V_, class T_>
struct Stored {
  using V = V_;
  using T = T_;
};
TOPKNOT_INLINE void by_storage(const ChannelGeometry& g, DType type, auto&& fn) {
  if (type == DType::bf16) {
    if (g.block == 16) return fn(Stored<Lanes, BFloat16>());
    if (g.block == 8) return fn(Stored<Lanes8, BFloat16>());
    return fn(Stored<float, BFloat16>());
  }
  if (g.block == 16) return fn(Stored<Lanes, float>());
  if (g.block == 8) return fn(Stored<Lanes8, float>());
  fn(Stored<float, float>());
}

// sums[c] = m, sums[C + c] = sum (x - m), sums[2 C + c] = sum (x - m)^2. m is the mean of four of the
// channel's values in the image: where the squares of x are much larger than the variance, its digits would
// cancel in a difference of sums about 0, or about the running mean, which may be anywhere. An image needs no
// other for it, so chunks of a batch can be summed in any order.
TOPKNOT_MULTIVERSION void image_sums(const ChannelGeometry& g, const Tensor& x, std::int64_t image,
                                     float* sums) {
  by_storage(
      g, x.dtype(), [&]<class S>(S) __attribute__((always_inline)) {
        sums_of<typename S::V>(g, g.image<typename S::T>(x, image), sums);
      });
}

// y = scale x + shift (+ residual), then max(0, .) where relu. `residual` may be undefined.
TOPKNOT_MULTIVERSION void image_apply(const ChannelGeometry& g, const Tensor& x, const Tensor& residual,
                                      Tensor& y, std::int64_t image, const float* scale, const float* shift,
                                      bool relu) {
  by_storage(
      g, x.dtype(), [&]<class S>(S) __attribute__((always_inline)) {
        using T = typename S::T;
        apply_any<typename S::V>(g, g.image<T>(x, image), g.image<T>(residual, image), g.image<T>(y, image),
                                 scale, shift, relu);
      });
}

// masked = grad where y > 0, else 0; sums[c] = sum masked, sums[C + c] = sum masked * (x - mean). With y
// undefined nothing is masked and `masked` is not written; `masked` may be `grad`.
TOPKNOT_MULTIVERSION void image_backward_sums(const ChannelGeometry& g, const Tensor& grad, const Tensor& y,
                                              const Tensor& x, std::int64_t image, const float* mean,
                                              Tensor& masked, float* sums) {
  by_storage(
      g, x.dtype(), [&]<class S>(S) __attribute__((always_inline)) {
        using T = typename S::T;
        using V = typename S::V;
        const T *d = g.image<T>(grad, image), *value = g.image<T>(y, image), *in = g.image<T>(x, image);
        T* to = g.image<T>(masked, image);
        if (value)
          backward_sums_of<V, true>(g, d, value, in, mean, to, sums);
        else
          backward_sums_of<V, false>(g, d, value, in, mean, to, sums);
      });
}

// dx = a grad + b x + c, of one image; dx may be the gradient's memory.
TOPKNOT_MULTIVERSION void image_backward_apply(const ChannelGeometry& g, const Tensor& grad, const Tensor& x,
                                               std::int64_t image, void* dx, const float* a, const float* b,
                                               const float* c) {
  by_storage(
      g, x.dtype(), [&]<class S>(S) __attribute__((always_inline)) {
        using T = typename S::T;
        backward_apply_of<typename S::V>(g, g.image<T>(grad, image), g.image<T>(x, image),
                                         static_cast<T*>(dx), a, b, c);
      });
}

// Per-image sums, added over the images in image order in double: the same bits for any number of threads.
struct ImageSums {
  ImageSums(const ChannelGeometry& g, std::int64_t per_channel)
      : channels(static_cast<std::size_t>(g.channels)),
        pixels(static_cast<double>(g.pixels)),
        width(static_cast<std::size_t>(per_channel * g.channels)),
        values(static_cast<std::size_t>(g.images) * width) {}
  float* of(std::int64_t image) { return values.data() + static_cast<std::size_t>(image) * width; }
  std::vector<double> totals() const {
    std::vector<double> sums(width);
    for (std::size_t i = 0; i < values.size(); i += width)
      for (std::size_t c = 0; c < width; ++c) sums[c] += values[i + c];
    return sums;
  }
  // sum (x - m) and sum (x - m)^2 over the batch from image_sums(), with its first image's m, values[c].
  std::vector<double> moments() const {
    std::vector<double> sums(2 * channels);
    for (const float* of = values.data(); of != values.data() + values.size(); of += width)
      for (std::size_t c = 0; c < channels; ++c) {
        const double moved = static_cast<double>(of[c]) - values[c], sum = of[channels + c];
        sums[c] += sum + pixels * moved;
        sums[channels + c] += of[2 * channels + c] + moved * (2 * sum + pixels * moved);
      }
    return sums;
  }
  std::size_t channels;
  double pixels;
  std::size_t width;
  std::vector<float> values;
};

// The statistics of the forward pass, and the affine form y = scale x + shift of the whole.
struct Normalization {
  std::vector<float> mean, inverse_std, scale, shift;
};

// Moves the running statistics if there are sums.
Normalization normalization(const ChannelGeometry& g, const ImageSums* sums, const BatchNormArguments& call) {
  std::vector<float>&running_mean = call.state.mean->values, &running_variance = call.state.variance->values;
  const float momentum = call.state.momentum;
  const float *gamma = call.gamma.data(), *beta = call.beta.data();
  const auto channels = static_cast<std::size_t>(g.channels);
  const double count = static_cast<double>(g.images * g.pixels);
  Normalization n{std::vector<float>(channels), std::vector<float>(channels), std::vector<float>(channels),
                  std::vector<float>(channels)};
  const std::vector<double> totals = sums ? sums->moments() : std::vector<double>();
  for (std::size_t c = 0; c < channels; ++c) {
    double mean = running_mean[c], variance = running_variance[c];
    if (sums) {
      const double offset = totals[c] / count;
      mean = sums->values[c] + offset;
      variance = std::max(0.0, totals[channels + c] / count - offset * offset);
      const double unbiased = count > 1 ? variance * count / (count - 1) : variance;
      running_mean[c] += momentum * (static_cast<float>(mean) - running_mean[c]);
      running_variance[c] += momentum * (static_cast<float>(unbiased) - running_variance[c]);
    }
    const double inverse_std = 1.0 / std::sqrt(variance + call.state.epsilon);
    n.mean[c] = static_cast<float>(mean);
    n.inverse_std[c] = static_cast<float>(inverse_std);
    n.scale[c] = static_cast<float>(gamma[c] * inverse_std);
    n.shift[c] = static_cast<float>(beta[c] - gamma[c] * inverse_std * mean);
  }
  return n;
}

Tensor apply(const Tensor& x, const Tensor& residual, const Normalization& n, bool relu) {
  const ChannelGeometry g(x);
  Tensor y = Tensor::empty_like(x);
  parallel_each(g.images, [&](std::int64_t i) {
    image_apply(g, x, residual, y, i, n.scale.data(), n.shift.data(), relu);
  });
  return y;
}

// Kept for the backward pass: the tensor that was normalised (x, or the convolution's), and the value.
struct Kept {
  Tensor x, y;
  Normalization n;
};

Tensor finish(const BatchNormArguments& call, Tensor x, const ImageSums* sums, OpState& state) {
  auto n = normalization(ChannelGeometry(x), sums, call);
  Tensor y = apply(x, call.residual, n, call.options.relu);
  state = std::make_shared<Kept>(Kept{std::move(x), y, std::move(n)});
  return y;
}

Tensor forward(const BatchNormArguments& call, OpState& state) {
  const ChannelGeometry g(call.x);
  ImageSums sums(g, 3);
  if (call.options.training)
    parallel_each(g.images, [&](std::int64_t i) { image_sums(g, call.x, i, sums.of(i)); });
  return finish(call, call.x, call.options.training ? &sums : nullptr, state);
}

// dx = a g + b x + c by channel, g the masked gradient, which is also the residual's.
struct Backward {
  Tensor masked;
  std::vector<float> a, b, c;
};

void put(const GradientTarget& target, std::size_t c, double value) {
  const auto v = static_cast<float>(value);
  if (target.data) target.data[c] = target.accumulate ? target.data[c] + v : v;
}

// The first half of the backward pass, with the gradients of gamma, beta and the residual.
Backward backward_sums(const BatchNormArguments& call, const Kept& kept, Tensor grad,
                       BatchNormGradients& out) {
  const Tensor& x = kept.x;
  const Normalization& n = kept.n;
  const ChannelGeometry g(x);
  ImageSums sums(g, 2);
  const bool relu = call.options.relu;
  Tensor masked = !relu || grad.exclusive() ? grad : Tensor::empty_like(x);
  const Tensor value = relu ? kept.y : Tensor();
  parallel_each(g.images, [&](std::int64_t i) {
    image_backward_sums(g, grad, value, x, i, n.mean.data(), masked, sums.of(i));
  });
  const auto channels = static_cast<std::size_t>(g.channels);
  const double count = static_cast<double>(g.images * g.pixels);
  Backward result{masked, std::vector<float>(channels), std::vector<float>(channels),
                  std::vector<float>(channels)};
  const std::vector<double> totals = sums.totals();
  for (std::size_t c = 0; c < channels; ++c) {
    const double sum = totals[c];
    const double inverse_std = n.inverse_std[c], mean = n.mean[c], scale = call.gamma.data()[c] * inverse_std;
    const double with_xhat = totals[channels + c] * inverse_std;
    put(out.beta, c, sum);
    put(out.gamma, c, with_xhat);
    const double b = call.options.training ? -scale * with_xhat / count * inverse_std : 0.0;
    result.a[c] = static_cast<float>(scale);
    result.b[c] = static_cast<float>(b);
    result.c[c] = call.options.training ? static_cast<float>(-scale * sum / count - b * mean) : 0.0f;
  }
  if (out.want_residual) out.residual = std::move(masked);
  return result;
}

// The second half, of images [begin, end): dx of the first of them at `to`.
void backward_apply(const Backward& b, const Tensor& x, std::int64_t begin, std::int64_t end, void* to) {
  const ChannelGeometry g(x);
  const std::size_t bytes = static_cast<std::size_t>(g.image_elements()) * size_of(x.dtype());
  auto* at = static_cast<std::byte*>(to);
  for (std::int64_t i = begin; i < end; ++i, at += bytes)
    image_backward_apply(g, b.masked, x, i, at, b.a.data(), b.b.data(), b.c.data());
}

void backward(const BatchNormArguments& call, const OpState& state, Tensor grad, BatchNormGradients& out) {
  const auto& kept = state_as<Kept>(state);
  const Backward b = backward_sums(call, kept, std::move(grad), out);
  if (!out.x.tensor.defined()) return;
  const ChannelGeometry g(kept.x);
  write_or_add(out.x, [&](Tensor& dx) {
    parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
      by_type(dx.dtype(),
              [&](auto type) { backward_apply(b, kept.x, begin, end, g.image<decltype(type)>(dx, begin)); });
    });
  });
}

Tensor conv_bn_forward(const ConvGeometry& geometry, const Tensor& weight, const BatchNormArguments& call,
                       OpState& state) {
  ChunkedConv& conv = chunked_conv(geometry);
  Tensor raw = Tensor::empty(geometry.output_shape(call.x.shape()), conv.output_layout(), {}, call.x.dtype());
  const ChannelGeometry g(raw);
  ImageSums sums(g, 3);
  ChunkedConv::ChunkFn sum_chunk;
  if (call.options.training)
    sum_chunk = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) image_sums(g, raw, i, sums.of(i));
    };
  conv.forward(call.x, weight.data(), raw, sum_chunk);
  return finish(call, raw, call.options.training ? &sums : nullptr, state);
}

void conv_bn_backward(const ConvGeometry& geometry, const Tensor& weight, const BatchNormArguments& call,
                      const OpState& state, Tensor grad, GradientTarget weight_gradient,
                      BatchNormGradients& out) {
  const auto& kept = state_as<Kept>(state);
  const Backward b = backward_sums(call, kept, std::move(grad), out);
  const auto fill = [&](std::int64_t begin, std::int64_t end, void* to) {
    backward_apply(b, kept.x, begin, end, to);
  };
  chunked_conv(geometry).backward(call.x, weight.data(), Tensor(), fill, weight_gradient, out.x);
}

const bool batch_norm_kernels = add_cpu_kernels<BatchNormKernels>({.forward = forward, .backward = backward});
const bool conv_bn_kernels =
    add_cpu_kernels<ConvBnKernels>({.forward = conv_bn_forward, .backward = conv_bn_backward});

}  // namespace
}  // namespace topknot
