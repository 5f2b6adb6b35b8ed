// The fully connected layer by cuBLAS. Under bf16 the weight is rounded for products; its gradient is fp32.
#include "nn/ops/cuda/products.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {
namespace {

OpState forward(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y) {
  const auto w = std::make_shared<Tensor>(weight_as(x.dtype(), weight));
  multiply(x.dim(0), weight.dim(0), x.dim(1), x.dtype(), {x.data(), false}, {w->data(), true}, false,
           y.data(), x.dtype());
  if (bias.defined()) add_bias(y, bias);
  return w;
}

void backward(const Tensor& x, const Tensor& weight, const Tensor& dy, const OpState& w,
              WeightedGradients& to) {
  const std::int64_t n = x.dim(0), features = x.dim(1), out = weight.dim(0);
  bias_gradient(dy, to.bias);
  if (to.weight.data)
    multiply(out, features, n, x.dtype(), {dy.data(), true}, {x.data(), false}, to.weight.accumulate,
             to.weight.data, DType::f32);
  if (to.x.tensor.defined())
    multiply(n, features, out, x.dtype(), {dy.data(), false}, {state_as<Tensor>(w).data(), false},
             to.x.accumulate, to.x.tensor.data(), x.dtype());
}

const bool linear_registered = add_cuda_kernels<LinearKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
