#include "nn/ops/batch_norm.h"

#include <cmath>

#include "nn/core/base/check.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cuda/batch_norm_kernels.h"
#include "nn/ops/cuda_ops.h"

namespace topknot {
namespace {

// Per-image sums, added over the images in image order in double: the same bits for any number of threads.
struct ImageSums {
  ImageSums(const ChannelGeometry& g, std::vector<float> shift_by)
      : shift(std::move(shift_by)),
        width(static_cast<std::size_t>(2 * g.channels)),
        values(static_cast<std::size_t>(g.images) * width) {}
  float* of(std::int64_t image) { return values.data() + static_cast<std::size_t>(image) * width; }
  std::vector<double> totals() const {
    std::vector<double> sums(width);
    for (std::size_t i = 0; i < values.size(); i += width)
      for (std::size_t c = 0; c < width; ++c) sums[c] += values[i + c];
    return sums;
  }
  std::vector<float> shift;  // subtracted from x
  std::size_t width;
  std::vector<float> values;
};

// What the forward pass normalised by, and the affine form y = scale x + shift of the whole.
struct Normalization {
  std::vector<float> mean, inverse_std, scale, shift;
};

Normalization normalization(const ChannelGeometry& g, const ImageSums* sums, const float* gamma,
                            const float* beta, const BatchNormState& state) {
  const auto channels = static_cast<std::size_t>(g.channels);
  const double count = static_cast<double>(g.images * g.pixels);
  Normalization n{std::vector<float>(channels), std::vector<float>(channels), std::vector<float>(channels),
                  std::vector<float>(channels)};
  const std::vector<double> totals = sums ? sums->totals() : std::vector<double>();
  for (std::size_t c = 0; c < channels; ++c) {
    double mean = (*state.mean)[c], variance = (*state.variance)[c];
    if (sums) {
      const double offset = totals[c] / count;
      mean = sums->shift[c] + offset;
      variance = std::max(0.0, totals[channels + c] / count - offset * offset);
      const double unbiased = count > 1 ? variance * count / (count - 1) : variance;
      (*state.mean)[c] += state.momentum * (static_cast<float>(mean) - (*state.mean)[c]);
      (*state.variance)[c] += state.momentum * (static_cast<float>(unbiased) - (*state.variance)[c]);
    }
    const double inverse_std = 1.0 / std::sqrt(variance + state.epsilon);
    n.mean[c] = static_cast<float>(mean);
    n.inverse_std[c] = static_cast<float>(inverse_std);
    n.scale[c] = static_cast<float>(gamma[c] * inverse_std);
    n.shift[c] = static_cast<float>(beta[c] - gamma[c] * inverse_std * mean);
  }
  return n;
}

Tensor apply(const Tensor& x, const Variable& residual, const Normalization& n, bool relu) {
  const ChannelGeometry g(x);
  Tensor y = Tensor::empty(x.shape(), x.layout());
  const float* shortcut = residual.defined() ? residual.value().data() : nullptr;
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = i * g.image_floats();
      bn_image_apply(g, x.data() + at, shortcut ? shortcut + at : nullptr, y.data() + at, n.scale.data(),
                     n.shift.data(), relu);
    }
  });
  return y;
}

// The first half of the backward pass. With xhat = (x - mean) inverse_std, M = N H W and g the masked gradient:
//   dbeta = sum g,  dgamma = sum g xhat
//   dx = gamma inverse_std (g - dbeta / M - xhat dgamma / M) = a g + b x + c
struct Backward {
  Tensor masked;  // g: also the gradient of the residual
  std::vector<float> a, b, c;
};

Backward backward_sums(Tensor grad, const Tensor& y, const Tensor& x, const Normalization& n,
                       const Variable& gamma, const Variable& beta, const BatchNormOptions& options) {
  const ChannelGeometry g(x);
  ImageSums sums(g, n.mean);
  Tensor masked = !options.relu || grad.exclusive() ? grad : Tensor::empty(x.shape(), x.layout());
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = i * g.image_floats();
      bn_image_backward_sums(g, grad.data() + at, options.relu ? y.data() + at : nullptr, x.data() + at,
                             sums.shift.data(), masked.data() + at, sums.of(i));
    }
  });
  const auto channels = static_cast<std::size_t>(g.channels);
  const double count = static_cast<double>(g.images * g.pixels);
  Backward result{masked, std::vector<float>(channels), std::vector<float>(channels),
                  std::vector<float>(channels)};
  Tensor dgamma = Tensor::empty({g.channels}), dbeta = Tensor::empty({g.channels});
  const std::vector<double> totals = sums.totals();
  for (std::size_t c = 0; c < channels; ++c) {
    const double sum = totals[c];
    const double inverse_std = n.inverse_std[c], mean = n.mean[c],
                 scale = gamma.value().data()[c] * inverse_std;
    const double with_xhat = totals[channels + c] * inverse_std;
    dbeta.data()[c] = static_cast<float>(sum);
    dgamma.data()[c] = static_cast<float>(with_xhat);
    // Running statistics do not depend on x, so outside training only the first term is left.
    const double b = options.training ? -scale * with_xhat / count * inverse_std : 0.0;
    result.a[c] = static_cast<float>(scale);
    result.b[c] = static_cast<float>(b);
    result.c[c] = options.training ? static_cast<float>(-scale * sum / count - b * mean) : 0.0f;
  }
  gamma.accumulate_grad(std::move(dgamma));
  beta.accumulate_grad(std::move(dbeta));
  return result;
}

void check_shapes(const char* op, const Shape& x, const Variable& gamma, const Variable& beta,
                  const Variable& residual, Layout layout) {
  TOPKNOT_CHECK(x.rank() == 4, std::string(op) + ": input must be [N, C, H, W], not " + x.str());
  TOPKNOT_CHECK(gamma.shape() == Shape({x[1]}) && beta.shape() == Shape({x[1]}),
                std::string(op) + ": gamma and beta must have one value a channel of " + x.str());
  TOPKNOT_CHECK(!residual.defined() || residual.shape() == x,
                std::string(op) + ": residual " + residual.shape().str() + " for output " + x.str());
  TOPKNOT_CHECK(!residual.defined() || residual.value().layout() == layout,
                std::string(op) + ": a residual in the output's layout");
}

std::vector<Variable> inputs_of(std::vector<Variable> inputs, const Variable& residual) {
  if (residual.defined()) inputs.push_back(residual);
  return inputs;
}

}  // namespace

Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, const Variable& residual,
                    const BatchNormState& state, const BatchNormOptions& options) {
  check_shapes("batch_norm", x.shape(), gamma, beta, residual, x.value().layout());
  if (on_gpu(x)) return cuda::batch_norm(x, gamma, beta, residual, state, options);
  const ChannelGeometry g(x.value());
  ImageSums sums(g, *state.mean);
  if (options.training)
    parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        bn_image_sums(g, x.value().data() + i * g.image_floats(), sums.shift.data(), sums.of(i));
    });
  auto n =
      normalization(g, options.training ? &sums : nullptr, gamma.value().data(), beta.value().data(), state);
  Tensor y = apply(x.value(), residual, n, options.relu);

  return {"batch_norm", y, inputs_of({x, gamma, beta}, residual), [=](Tensor grad) {
            Backward b = backward_sums(std::move(grad), y, x.value(), n, gamma, beta, options);
            if (x.requires_grad()) {
              Tensor dx = Tensor::empty(x.shape(), x.value().layout());
              parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                  const std::int64_t at = i * g.image_floats();
                  bn_image_backward_apply(g, b.masked.data() + at, x.value().data() + at, dx.data() + at,
                                          b.a.data(), b.b.data(), b.c.data());
                }
              });
              x.accumulate_grad(std::move(dx));
            }
            if (residual.defined()) residual.accumulate_grad(std::move(b.masked));
          }};
}

Variable conv_bn(const Variable& x, const Variable& weight, const Variable& gamma, const Variable& beta,
                 const Variable& residual, const ConvGeometry& geometry,
                 const std::shared_ptr<ConvKernels>& kernels, const BatchNormState& state,
                 const BatchNormOptions& options) {
  TOPKNOT_CHECK(
      x.shape().rank() == 4 && x.shape()[1] == geometry.in,
      "conv_bn: input " + x.shape().str() + " for " + std::to_string(geometry.in) + " input channels");
  const Shape shape = geometry.output_shape(x.shape());
  check_shapes("conv_bn", shape, gamma, beta, residual, on_gpu(x) ? Layout::nhwc : kernels->output_layout());
  if (on_gpu(x))
    return cuda::batch_norm(cuda::conv2d(x, weight, {}, geometry), gamma, beta, residual, state, options);
  Tensor raw = Tensor::empty(shape, kernels->output_layout());
  const ChannelGeometry g(raw);
  ImageSums sums(g, *state.mean);
  ConvKernels::ChunkFn sum_chunk;
  if (options.training)
    sum_chunk = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        bn_image_sums(g, raw.data() + i * g.image_floats(), sums.shift.data(), sums.of(i));
    };
  kernels->forward(x.value(), weight.value().data(), raw, sum_chunk);
  auto n =
      normalization(g, options.training ? &sums : nullptr, gamma.value().data(), beta.value().data(), state);
  Tensor y = apply(raw, residual, n, options.relu);

  return {"conv_bn", y, inputs_of({x, weight, gamma, beta}, residual), [=](Tensor grad) {
            Backward b = backward_sums(std::move(grad), y, raw, n, gamma, beta, options);
            const auto fill = [&](std::int64_t begin, std::int64_t end, float* out) {
              for (std::int64_t i = begin; i < end; ++i) {
                const std::int64_t at = i * g.image_floats();
                bn_image_backward_apply(g, b.masked.data() + at, raw.data() + at,
                                        out + (i - begin) * g.image_floats(), b.a.data(), b.b.data(),
                                        b.c.data());
              }
            };
            InputGradient dx = x.input_gradient();
            kernels->backward(x.value(), weight.value().data(), Tensor(), fill, weight.gradient_target(), dx);
            x.accumulate_grad(std::move(dx.tensor));
            if (residual.defined()) residual.accumulate_grad(std::move(b.masked));
          }};
}

}  // namespace topknot
