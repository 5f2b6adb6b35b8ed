// The fully connected layer by oneDNN's sgemm.
#include "nn/ops/linear.h"

#include "nn/ops/cpu/gemm.h"

namespace topknot {
namespace {

OpState forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) {
  const std::int64_t n = x.dim(0), features = x.dim(1), out = weight.dim(0);
  if (bias.defined())
    for (std::int64_t i = 0; i < n; ++i) std::copy(bias.data(), bias.data() + out, y.data() + i * out);
  matmul(false, true, n, out, features, x.data(), weight.data(), bias.defined() ? 1.0f : 0.0f, y.data());
  return nullptr;
}

void backward(const Tensor& x, const Tensor& weight, const Tensor& dy, const OpState&,
              WeightedGradients& to) {
  const std::int64_t n = x.dim(0), features = x.dim(1), out = weight.dim(0);
  bias_gradient(dy, to.bias);
  if (to.weight.data)
    matmul(true, false, out, features, n, dy.data(), x.data(), to.weight.accumulate ? 1.0f : 0.0f,
           to.weight.data);
  if (to.x.tensor.defined())
    write_or_add(to.x, [&](Tensor& dx) {
      matmul(false, false, n, features, out, dy.data(), weight.data(), 0.0f, dx.data());
    });
}

const RegisterKernels<LinearKernels> linear_registered(DeviceKind::cpu,
                                                       {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot
