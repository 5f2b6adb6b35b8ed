// The fully connected layer, by matrix products. In bfloat16 the weight is rounded once and kept for the backward pass.
#include "nn/ops/linear.h"

#include "nn/ops/cpu/gemm.h"
#include "nn/ops/layout.h"

namespace topknot {
namespace {

OpState forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) {
  const std::int64_t n = x.dim(0), features = x.dim(1), out = weight.dim(0);
  const bool wide = x.dtype() == DType::f32;
  const Tensor w = in_form(weight, Layout::plain, x.dtype());
  Tensor sums = wide ? y : Tensor::empty({n, out});
  if (bias.defined())
    for (std::int64_t i = 0; i < n; ++i) std::copy(bias.data(), bias.data() + out, sums.data() + i * out);
  matmul(false, true, n, out, features, x.dtype(), x.data(), w.data(), bias.defined() ? 1.0f : 0.0f,
         sums.data());
  if (!wide) y = in_form(sums, Layout::plain, x.dtype());
  return std::make_shared<Tensor>(w);
}

void backward(const Tensor& x, const Tensor& weight, const Tensor& dy, const OpState& state,
              WeightedGradients& to) {
  const std::int64_t n = x.dim(0), features = x.dim(1), out = weight.dim(0);
  const Tensor& w = state_as<Tensor>(state);
  bias_gradient(dy, to.bias);
  if (to.weight.data)
    matmul(true, false, out, features, n, x.dtype(), dy.data(), x.data(), to.weight.accumulate ? 1.0f : 0.0f,
           to.weight.data);
  if (!to.x.tensor.defined()) return;
  write_or_add(to.x, [&](Tensor& dx) {
    const bool wide = dx.dtype() == DType::f32;
    Tensor sums = wide ? dx : Tensor::empty({n, features});
    matmul(false, false, n, features, out, x.dtype(), dy.data(), w.data(), 0.0f, sums.data());
    if (!wide) dx = in_form(sums, Layout::plain, dx.dtype());
  });
}

const RegisterKernels<LinearKernels> linear_registered(DeviceKind::cpu,
                                                       {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot
