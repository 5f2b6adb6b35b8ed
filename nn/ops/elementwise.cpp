#include "nn/ops/elementwise.h"

#include "nn/core/base/check.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/cuda_ops.h"

namespace topknot {
namespace {

template <class Fn>
void for_each_element(std::int64_t n, Fn&& fn) {
  if (n < 32768) {
    for (std::int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  parallel_ranges(n, [&](int, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) fn(i);
  });
}

}  // namespace

Variable relu(const Variable& x) {  // the comparisons let NaN through
  if (on_gpu(x)) return cuda::relu(x);
  Tensor y = Tensor::empty(x.shape(), x.value().layout());
  const float* in = x.value().data();
  float* out = y.data();
  for_each_element(y.numel(), [=](std::int64_t i) { out[i] = in[i] <= 0 ? 0 : in[i]; });

  return {"relu", y, {x}, [=](Tensor grad) {  // dx = dy where y > 0
            Tensor dx = grad.exclusive() ? grad : Tensor::empty(grad.shape(), grad.layout());
            const float *dy = grad.data(), *value = y.data();
            float* d = dx.data();
            for_each_element(dx.numel(), [=](std::int64_t i) { d[i] = value[i] <= 0 ? 0 : dy[i]; });
            x.accumulate_grad(std::move(dx));
          }};
}

Variable add(const Variable& a, const Variable& b) {
  TOPKNOT_CHECK(a.shape() == b.shape(), "add: " + a.shape().str() + " and " + b.shape().str());
  if (on_gpu(a)) return cuda::add(a, b);
  const Layout layout = a.value().layout();
  const Tensor other = to_layout(b.value(), layout);
  Tensor y = Tensor::empty(a.shape(), layout);
  const float *p = a.value().data(), *q = other.data();
  float* out = y.data();
  for_each_element(y.numel(), [=](std::int64_t i) { out[i] = p[i] + q[i]; });

  return {"add", y, {a, b}, [=](Tensor grad) {  // da = db = dy
            b.accumulate_grad(to_layout(grad, b.value().layout()));
            a.accumulate_grad(std::move(grad));
          }};
}

Variable dropout(const Variable& x, float p, const CounterRng& rng, const std::uint32_t* step) {
  TOPKNOT_CHECK(p >= 0 && p < 1, "dropout: p must be in [0, 1)");
  if (p == 0) return x;
  if (on_gpu(x)) return cuda::dropout(x, p, rng, step);
  Tensor mask = Tensor::empty(x.shape());
  const float keep = 1.0f / (1.0f - p);
  float* m = mask.data();
  for_each_element(mask.numel(), [=](std::int64_t i) {
    m[i] = rng.uniform(static_cast<std::uint64_t>(i)) < p ? 0.0f : keep;
  });
  if (x.shape().rank() == 4) mask = to_layout(mask, x.value().layout());
  const auto times_mask = [mask](const Tensor& t) {
    Tensor result = Tensor::empty(t.shape(), t.layout());
    const float *in = t.data(), *scale = mask.data();
    float* out = result.data();
    for_each_element(t.numel(), [=](std::int64_t i) { out[i] = in[i] * scale[i]; });
    return result;
  };
  return {"dropout", times_mask(x.value()), {x}, [=](Tensor grad) { x.accumulate_grad(times_mask(grad)); }};
}

}  // namespace topknot
