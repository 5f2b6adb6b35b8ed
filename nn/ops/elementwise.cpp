#include "nn/ops/elementwise.h"

#include "nn/ops/layout.h"

namespace topknot {

Variable relu(const Variable& x) {
  const auto& kernels = kernels_for<ReluKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  kernels.forward(x.value(), y);
  return {"relu", y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = grad.exclusive() ? grad : Tensor::empty_like(grad);
            kernels.backward(y, grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

namespace {
Variable activation(const char* op, const ActivationRule& rule, const Variable& x) {
  const auto& kernels = kernels_for<ActivationKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  kernels.forward(rule, x.value(), y);
  return {op, y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = grad.exclusive() ? grad : Tensor::empty_like(grad);
            kernels.backward(rule, x.value(), grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}
}  // namespace

Variable clamp(const Variable& x, float low, float high) {
  TOPKNOT_CHECK(low < high, "clamp: the lower limit must be below the upper");
  return activation("clamp", {ActivationKind::clamp, low, high}, x);
}
Variable hardswish(const Variable& x) {
  return activation("hardswish", {ActivationKind::hardswish}, x);
}
Variable sigmoid(const Variable& x) {
  return activation("sigmoid", {ActivationKind::sigmoid}, x);
}
Variable silu(const Variable& x) {
  return activation("silu", {ActivationKind::silu}, x);
}

Variable add(const Variable& a, const Variable& b) {
  TOPKNOT_CHECK(a.shape() == b.shape(), "add: " + a.shape().str() + " and " + b.shape().str());
  const Tensor& left = a.value();
  const Tensor right = in_form(b.value(), left.layout(), left.dtype());
  Tensor y = Tensor::empty_like(left);
  backend(y.device())
      .add(y.dtype(), left.data(), right.data(), y.data(), static_cast<std::size_t>(y.numel()));
  return {"add", y, {a, b}, [=](Tensor grad) {  // da = db = dy
            b.accumulate_grad(in_form(grad, b.value().layout(), b.value().dtype()));
            a.accumulate_grad(std::move(grad));
          }};
}

Variable dropout(const Variable& x, float p, const CounterRng& rng, const std::uint32_t* step) {
  TOPKNOT_CHECK(p >= 0 && p < 1, "dropout: p must be in [0, 1)");
  if (p == 0) return x;
  const auto& kernels = kernels_for<DropoutKernels>(x);
  const OpState mask = kernels.mask(x.value(), p, rng, step);
  return {"dropout", kernels.times_mask(x.value(), mask), {x}, [=, &kernels](Tensor grad) {
            x.accumulate_grad(kernels.times_mask(grad, mask));
          }};
}

}  // namespace topknot
