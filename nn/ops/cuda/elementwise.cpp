#include "nn/ops/elementwise.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/activation_kernels.h"

namespace topknot::cuda {
namespace {

std::size_t count(const Tensor& x) {
  return static_cast<std::size_t>(x.numel());
}
bool is_bf16(const Tensor& x) {
  return x.dtype() == DType::bf16;
}

void forward(const Tensor& x, Tensor& y) {
  relu_forward(Context::current().stream(), is_bf16(x), x.data(), y.data(), count(x));
}
void backward(const Tensor& y, const Tensor& dy, Tensor& dx) {
  relu_backward(Context::current().stream(), is_bf16(y), y.data(), dy.data(), dx.data(), count(y));
}

void activate(const ActivationRule& rule, const Tensor& x, Tensor& y) {
  activation_forward(Context::current().stream(), is_bf16(x), rule, x.data(), y.data(), count(x));
}
void activate_backward(const ActivationRule& rule, const Tensor& x, const Tensor& dy, Tensor& dx) {
  activation_backward(Context::current().stream(), is_bf16(x), rule, x.data(), dy.data(), dx.data(),
                      count(x));
}

// The mask is drawn anew from the same numbers in the backward pass.
struct Mask {
  float p, keep;
  DropoutShape shape;
  PhiloxStream stream;
  const std::uint32_t* step;
};

OpState mask_of(const Tensor& x, float p, const CounterRng& rng, const std::uint32_t* step) {
  DropoutShape shape;
  if (x.layout() == Layout::nhwc) {
    // Numbers are counted in 32 bits in the kernels that go by N, H, W, C order.
    TOPKNOT_CHECK(x.numel() < std::int64_t{1} << 32,
                  "dropout: fewer than 2^32 elements, not " + x.shape().str());
    shape = {static_cast<std::uint32_t>(x.dim(1)), static_cast<std::uint32_t>(x.dim(2) * x.dim(3))};
  }
  return std::make_shared<Mask>(Mask{p, 1.0f / (1.0f - p), shape, rng.stream(), step});
}

Tensor times_mask(const Tensor& t, const OpState& state) {
  const auto& m = state_as<Mask>(state);
  Tensor out = Tensor::empty_like(t);
  dropout_mask(Context::current().stream(), is_bf16(t), t.data(), out.data(), count(t), m.shape, m.p, m.keep,
               m.stream, m.step);
  return out;
}

const RegisterKernels<ReluKernels> relu_kernels(DeviceKind::cuda, {.forward = forward, .backward = backward});
const RegisterKernels<ActivationKernels> activation_kernels(DeviceKind::cuda,
                                                            {.forward = activate,
                                                             .backward = activate_backward});
const RegisterKernels<DropoutKernels> dropout_kernels(DeviceKind::cuda,
                                                      {.mask = mask_of, .times_mask = times_mask});

}  // namespace
}  // namespace topknot::cuda
