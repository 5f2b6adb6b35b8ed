#pragma once
// A batch norm on a GPU, by the op and by each of its methods.

#include "nn/ops/cuda/batch_norm.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/batch_norm_case.h"

namespace topknot::testing {

struct BatchNormProbe : BatchNormCase {
  using BatchNormCase::BatchNormCase;
  Tensor activation(const std::vector<float>& values) const {
    return gpu_tensor(values, s.shape(), Layout::nhwc, type);
  }
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

}  // namespace topknot::testing
