#include "nn/ops/elementwise.h"

#include "nn/ops/cpu/channels.h"
#include "nn/ops/layout.h"

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

// The comparisons let a NaN through.
void relu_forward(const Tensor& x, Tensor& y) {
  const float* in = x.data();
  float* out = y.data();
  for_each_element(y.numel(), [=](std::int64_t i) { out[i] = in[i] <= 0 ? 0 : in[i]; });
}
void relu_backward(const Tensor& y, const Tensor& dy, Tensor& dx) {
  const float *grad = dy.data(), *value = y.data();
  float* d = dx.data();
  for_each_element(dx.numel(), [=](std::int64_t i) { d[i] = value[i] <= 0 ? 0 : grad[i]; });
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
  const float *in = t.data(), *scale = state_as<Tensor>(state).data();
  float* out = result.data();
  for_each_element(t.numel(), [=](std::int64_t i) { out[i] = in[i] * scale[i]; });
  return result;
}

const RegisterKernels<ReluKernels> relu_kernels(DeviceKind::cpu,
                                                {.forward = relu_forward, .backward = relu_backward});
const RegisterKernels<DropoutKernels> dropout_kernels(DeviceKind::cpu,
                                                      {.mask = dropout_mask, .times_mask = times_mask});

}  // namespace
}  // namespace topknot
