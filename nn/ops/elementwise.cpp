#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

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
Variable gelu(const Variable& x) {
  return activation("gelu", {ActivationKind::gelu}, x);
}
Variable gelu_tanh(const Variable& x) {
  return activation("gelu_tanh", {ActivationKind::gelu_tanh}, x);
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

namespace {

void for_each_element(std::int64_t n, auto&& fn) {
  if (n < 32768) {
    for (std::int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  parallel_each(n, fn);
}

// `value`, or 0 if `of` <= 0, which is false for a NaN: relu lets it through. A bfloat16 is compared by its
// bits, from 0x8000 (-0) to 0xFF80 (minus infinity), so that a loop takes 8 and more at a time.
float where_positive(float of, float value) {
  return of <= 0 ? 0 : value;
}
BFloat16 where_positive(BFloat16 of, BFloat16 value) {
  const bool none = (static_cast<std::uint16_t>(of.bits - 0x8000) <= 0x7F80) | (of.bits == 0);
  return {static_cast<std::uint16_t>(none ? 0 : value.bits)};
}

void relu_forward(const Tensor& x, Tensor& y) {
  by_type(x.dtype(), [&]<class T>(T) {
    const T* in = x.as<T>();
    T* out = y.as<T>();
    for_each_element(y.numel(), [=](std::int64_t i) { out[i] = where_positive(in[i], in[i]); });
  });
}
void relu_backward(const Tensor& y, const Tensor& dy, Tensor& dx) {
  by_type(dx.dtype(), [&]<class T>(T) {
    const T *grad = dy.as<T>(), *value = y.as<T>();
    T* d = dx.as<T>();
    for_each_element(dx.numel(), [=](std::int64_t i) { d[i] = where_positive(value[i], grad[i]); });
  });
}

template <class T>
TOPKNOT_INLINE void activate(const ActivationRule& rule, const T* x, T* y, std::int64_t n) {
  by_kind(
      rule, [=](auto of) __attribute__((always_inline)) {
        in_lanes(
            n, [=]<class V>(std::int64_t i, V)
                   __attribute__((always_inline)) { store_as<V>(y + i, of.value(load_as<V>(x + i))); });
      });
}
template <class T>
TOPKNOT_INLINE void activate_backward(const ActivationRule& rule, const T* x, const T* dy, T* dx,
                                      std::int64_t n) {
  by_kind(
      rule, [=](auto of) __attribute__((always_inline)) {
        in_lanes(
            n, [=]<class V>(std::int64_t i, V) __attribute__((always_inline)) {
              store_as<V>(dx + i, load_as<V>(dy + i) * of.slope(load_as<V>(x + i)));
            });
      });
}

TOPKNOT_MULTIVERSION void activation_loop(const ActivationRule& rule, const Tensor& x, Tensor& y,
                                          std::int64_t begin, std::int64_t end) {
  if (x.dtype() == DType::bf16)
    activate(rule, x.as<BFloat16>() + begin, y.as<BFloat16>() + begin, end - begin);
  else
    activate(rule, x.data() + begin, y.data() + begin, end - begin);
}
TOPKNOT_MULTIVERSION void activation_backward_loop(const ActivationRule& rule, const Tensor& x,
                                                   const Tensor& dy, Tensor& dx, std::int64_t begin,
                                                   std::int64_t end) {
  if (x.dtype() == DType::bf16)
    activate_backward(rule, x.as<BFloat16>() + begin, dy.as<BFloat16>() + begin, dx.as<BFloat16>() + begin,
                      end - begin);
  else
    activate_backward(rule, x.data() + begin, dy.data() + begin, dx.data() + begin, end - begin);
}

void activation_forward(const ActivationRule& rule, const Tensor& x, Tensor& y) {
  parallel_ranges(
      x.numel(), [&](int, std::int64_t begin, std::int64_t end) { activation_loop(rule, x, y, begin, end); });
}
void activation_backward(const ActivationRule& rule, const Tensor& x, const Tensor& dy, Tensor& dx) {
  parallel_ranges(x.numel(), [&](int, std::int64_t begin, std::int64_t end) {
    activation_backward_loop(rule, x, dy, dx, begin, end);
  });
}

OpState dropout_mask(const Tensor& x, float p, const CounterRng& rng, const std::uint32_t*) {
  Tensor mask = Tensor::empty(x.shape());
  const float keep = 1.0f / (1.0f - p);
  float* m = mask.data();
  for_each_element(mask.numel(), [=](std::int64_t i) {
    m[i] = rng.uniform(static_cast<std::uint64_t>(i)) < p ? 0.0f : keep;
  });
  return std::make_shared<Tensor>(to_layout(mask, x.layout()));
}
Tensor times_mask(const Tensor& t, const OpState& state) {
  Tensor result = Tensor::empty_like(t);
  const float* scale = state_as<Tensor>(state).data();
  by_type(t.dtype(), [&]<class T>(T) {
    const T* in = t.as<T>();
    T* out = result.as<T>();
    for_each_element(t.numel(), [=](std::int64_t i) { narrow(widened(in[i]) * scale[i], out[i]); });
  });
  return result;
}

const bool relu_kernels = add_cpu_kernels<ReluKernels>({.forward = relu_forward, .backward = relu_backward});
const bool activation_kernels =
    add_cpu_kernels<ActivationKernels>({.forward = activation_forward, .backward = activation_backward});
const bool dropout_kernels =
    add_cpu_kernels<DropoutKernels>({.mask = dropout_mask, .times_mask = times_mask});

}  // namespace
}  // namespace topknot
