#pragma once
// A batch norm on a GPU with what belongs to it: inputs, running statistics, and the formula's results in float64.

#include "nn/ops/cuda/batch_norm.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot::testing {

using reference::Array;
using testing::random_values;

struct BatchNormSetup {
  std::int64_t n, channels, height, width;
  bool residual, relu, training = true;
  float mean = 0.3f;    // of the input
  float before = mean;  // of the running mean
  Shape shape() const { return {n, channels, height, width}; }
  std::string str() const {
    return shape().str() + (residual ? ", residual" : "") + (relu ? ", relu" : "") +
           (training ? ", training" : ", evaluation");
  }
};

struct BatchNormProbe {
  BatchNormProbe(const BatchNormSetup& setup, DType of_type)
      : s(setup),
        type(of_type),
        x(rounded_to(type, random_values(s.shape().numel(), 1, s.mean))),
        residual(s.residual ? rounded_to(type, random_values(s.shape().numel(), 4)) : std::vector<float>()),
        gamma(random_values(s.channels, 2, 1)),
        beta(random_values(s.channels, 3)),
        mean(random_values(s.channels, 6, s.before)),
        variance(gamma.size()),
        dy(rounded_to(type, random_values(s.shape().numel(), 5))) {
    for (std::size_t c = 0; c < variance.size(); ++c) variance[c] = 0.5f + 0.1f * static_cast<float>(c % 7);
    if (!s.relu) return;
    // Where y is near 0 rounding decides whether the gradient counts: no gradient there.
    const auto r = formula(false);
    for (std::size_t i = 0; i < dy.size(); ++i)
      if (std::abs(r.y[i]) < 0.02 * r.y_scale[i]) dy[i] = 0;
  }
  reference::BatchNorm formula(bool relu) const {
    const Array values = testing::as_double(x);
    return reference::batch_norm(
        {s.n, s.channels, s.height * s.width}, values, reference::absolute(values), testing::as_double(gamma),
        testing::as_double(beta), testing::as_double(residual),
        s.training ? Array() : testing::as_double(mean), s.training ? Array() : testing::as_double(variance),
        static_cast<double>(epsilon), relu, testing::as_double(dy));
  }
  Tensor activation(const std::vector<float>& values) const {
    return gpu_tensor(values, s.shape(), Layout::nhwc, type);
  }

  BatchNormSetup s;
  DType type;
  std::vector<float> x, residual, gamma, beta, mean, variance, dy;
  static constexpr float momentum = 0.3f, epsilon = 1e-3f;
};

// Running statistics in GPU memory.
struct RunningStatistics {
  explicit RunningStatistics(const BatchNormProbe& p) : mean(p.mean), variance(p.variance) {
    mean_buffer.device = mean.data(), variance_buffer.device = variance.data();
    state.momentum = p.momentum, state.epsilon = p.epsilon;
    state.mean = &mean_buffer, state.variance = &variance_buffer;
  }
  RunningStatistics(const RunningStatistics&) = delete;
  DeviceVector<float> mean, variance;
  Buffer mean_buffer, variance_buffer;
  BatchNormState state;
};

struct BatchNormResult {
  std::vector<float> y, dx, dgamma, dbeta, dresidual, mean, variance;
  bool operator==(const BatchNormResult&) const = default;
};

// By the op.
inline BatchNormResult by_op(const BatchNormProbe& p) {
  RunningStatistics running(p);
  const CaughtInput x(p.activation(p.x)), residual(p.activation(p.s.residual ? p.residual : p.x));
  const GpuLeaf gamma({p.s.channels}, p.gamma), beta({p.s.channels}, p.beta);
  const Variable y =
      batch_norm(x.variable(), gamma.variable(), beta.variable(),
                 p.s.residual ? residual.variable() : Variable(), running.state, {p.s.training, p.s.relu});
  BatchNormResult r;
  r.y = values_of(y.value());
  backward_from({{y, p.dy}});
  r.dx = x.gradient();
  r.dgamma = gamma.gradient(), r.dbeta = beta.gradient();
  if (p.s.residual) r.dresidual = residual.gradient();
  r.mean = running.mean.host(), r.variance = running.variance.host();
  return r;
}

// By one of the methods. Throws BatchNormUnsupported where this GPU's cuDNN has no such thing.
inline BatchNormResult by_method(cuda::BatchNormKind kind, const BatchNormProbe& p) {
  const DeviceVector<float> gamma(p.gamma), beta(p.beta), dgamma(p.gamma), dbeta(p.beta);
  RunningStatistics running(p);
  const Device gpu = cuda::Context::current().device();
  const BatchNormArguments call{p.activation(p.x),
                                Tensor::view(gamma.data(), {p.s.channels}, gpu),
                                Tensor::view(beta.data(), {p.s.channels}, gpu),
                                p.s.residual ? p.activation(p.residual) : Tensor(),
                                running.state,
                                {p.s.training, p.s.relu}};
  const auto method = cuda::make_batch_norm_method(kind, call);
  cuda::BatchNormKept kept;
  const Tensor y = method->forward(call, kept);
  BatchNormGradients out;
  out.gamma = {dgamma.data(), false}, out.beta = {dbeta.data(), false};
  out.x.tensor = Tensor::empty_like(call.x);
  out.want_residual = p.s.residual;
  BatchNormResult r;
  r.y = values_of(y);
  method->backward(call, kept, p.activation(p.dy), out);
  r.dx = values_of(out.x.tensor);
  r.dgamma = dgamma.host(), r.dbeta = dbeta.host();
  if (p.s.residual) r.dresidual = values_of(out.residual);
  r.mean = running.mean.host(), r.variance = running.variance.host();
  return r;
}

// Sums are those of fp32. What is stored as bfloat16 is off by up to 2^-8 of its terms for each time it is rounded:
// once by our kernels, twice where they finish what cuDNN stored.
inline void check_formula(const BatchNormProbe& p, const BatchNormResult& r, int roundings) {
  using testing::check_close;
  const double stored = 2e-6 + (p.type == DType::bf16 ? roundings / 256.0 : 0);
  const auto f = p.formula(p.s.relu);
  check_close("y", r.y, f.y, f.y_scale, stored);
  check_close("dx", r.dx, f.dx, f.dx_scale, stored);
  check_close("dgamma", r.dgamma, f.dgamma, f.dgamma_scale, 2e-6);
  check_close("dbeta", r.dbeta, f.dbeta, f.dbeta_scale, 2e-6);
  if (p.s.residual) check_close("dresidual", r.dresidual, f.dresidual, 0);
  if (!p.s.training) {
    CHECK((r.mean == p.mean));
    CHECK((r.variance == p.variance));
    return;
  }
  Array mean(p.mean.size()), variance(mean.size()), scale(mean.size());
  const double count = static_cast<double>(p.s.n * p.s.height * p.s.width), w = p.momentum;
  for (std::size_t c = 0; c < mean.size(); ++c) {
    mean[c] = (1 - w) * p.mean[c] + w * f.mean[c];
    variance[c] = (1 - w) * p.variance[c] + w * f.variance[c] * (count > 1 ? count / (count - 1) : 1);
    scale[c] = std::abs(mean[c]) + 1;
  }
  check_close("running mean", r.mean, mean, scale, 1e-6);
  check_close("running variance", r.variance, variance, 5e-6);
}

}  // namespace topknot::testing
