// relu, add and dropout on a GPU.
#include "nn/core/base/check.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/activation.h"
#include "nn/ops/cuda/elementwise_kernels.h"
#include "nn/ops/cuda_ops.h"

namespace topknot::cuda {
namespace {

std::size_t size_of(const Tensor& x) {
  return static_cast<std::size_t>(x.numel());
}
bool is_bf16(const Tensor& x) {
  return x.dtype() == DType::bf16;
}

// Numbers are counted in 32 bits in the kernels that go by N, H, W, C order.
DropoutShape dropout_shape(const Tensor& x) {
  if (x.layout() != Layout::nhwc) return {};
  TOPKNOT_CHECK(x.numel() < std::int64_t{1} << 32,
                "dropout: fewer than 2^32 elements, not " + x.shape().str());
  return {static_cast<std::uint32_t>(x.dim(1)), static_cast<std::uint32_t>(x.dim(2) * x.dim(3))};
}

}  // namespace

Variable relu(const Variable& x) {
  const Tensor& in = x.value();
  Tensor y = Tensor::empty_like(in);
  relu_forward(Context::current().stream(), is_bf16(in), in.data(), y.data(), size_of(in));
  return {"relu", y, {x}, [=](Tensor grad) {
            Tensor dx = grad.exclusive() ? grad : Tensor::empty_like(grad);
            relu_backward(Context::current().stream(), is_bf16(y), y.data(), grad.data(), dx.data(),
                          size_of(y));
            x.accumulate_grad(std::move(dx));
          }};
}

Variable add(const Variable& a, const Variable& b) {
  const Tensor& left = a.value();
  const Tensor right = in_form(b.value(), left.layout(), left.dtype());
  Tensor y = Tensor::empty_like(left);
  backend(y.device()).add(y.dtype(), left.data(), right.data(), y.data(), size_of(y));
  return {"add", y, {a, b}, [=](Tensor grad) {
            b.accumulate_grad(in_form(grad, b.value().layout(), b.value().dtype()));
            a.accumulate_grad(std::move(grad));
          }};
}

Variable dropout(const Variable& x, float p, const CounterRng& rng, const std::uint32_t* step) {
  const float keep = 1.0f / (1.0f - p);
  const DropoutShape shape = dropout_shape(x.value());
  const auto times_mask = [=, stream = rng.stream()](const Tensor& in) {
    Tensor out = Tensor::empty_like(in);
    dropout_mask(Context::current().stream(), is_bf16(in), in.data(), out.data(), size_of(in), shape, p, keep,
                 stream, step);
    return out;
  };
  return {"dropout", times_mask(x.value()), {x}, [=](Tensor grad) { x.accumulate_grad(times_mask(grad)); }};
}

}  // namespace topknot::cuda
