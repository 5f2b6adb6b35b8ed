#include "nn/ops/loss.h"

#include <fmt/format.h>

#include "nn/ops/layout.h"

namespace topknot {
namespace {

void check_logits(const char* op, const Tensor& logits, std::span<const std::int32_t> labels) {
  const Shape& shape = logits.shape();
  TOPKNOT_CHECK(
      shape.rank() == 2 && shape[0] == static_cast<std::int64_t>(labels.size()) && shape.numel() > 0,
      fmt::format("{}: logits {} for {} labels", op, shape.str(), labels.size()));
}

}  // namespace

Variable softmax_cross_entropy(const Variable& logits, std::span<const std::int32_t> labels,
                               float smoothing) {
  check_logits("softmax_cross_entropy", logits.value(), labels);
  TOPKNOT_CHECK(smoothing >= 0 && smoothing < 1, "softmax_cross_entropy: smoothing in [0, 1)");
  const auto& kernels = kernels_for<CrossEntropyKernels>(logits);
  Tensor loss = Tensor::empty({1}, Layout::plain, logits.value().device());
  const OpState state = kernels.forward(logits.value(), labels, smoothing, loss);
  return {"softmax_cross_entropy", loss, {logits}, [=, &kernels](Tensor grad) {
            Tensor dz = Tensor::empty_like(logits.value());
            kernels.backward(logits.value(), state, smoothing, grad, dz);
            logits.accumulate_grad(std::move(dz));
          }};
}

Variable mean_squared_error(const Variable& y, const Tensor& target) {
  const Tensor& out = y.value();
  TOPKNOT_CHECK(out.shape() == target.shape() && out.numel() > 0,
                fmt::format("mean_squared_error: {} against {}", out.shape().str(), target.shape().str()));
  TOPKNOT_CHECK(
      out.layout() == target.layout() && target.dtype() == DType::f32 && target.device() == out.device(),
      "mean_squared_error: a target in f32 on the same device and in the same layout");
  if (needs_f32(y)) return mean_squared_error(cast(y, DType::f32), target);
  const auto& kernels = kernels_for<SquaredErrorKernels>(y);
  Tensor loss = Tensor::empty({1}, Layout::plain, out.device());
  kernels.forward(out, target, loss);
  return {"mean_squared_error", loss, {y}, [=, &kernels](Tensor grad) {
            Tensor dy = Tensor::empty_like(y.value());
            kernels.backward(y.value(), target, grad, dy);
            y.accumulate_grad(std::move(dy));
          }};
}

void count_correct(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum) {
  check_logits("count_correct", logits, labels);
  const bool cpu = logits.device().kind == DeviceKind::cpu;
  const Tensor z = cpu ? in_form(logits, logits.layout(), DType::f32) : logits;
  kernels_for<CrossEntropyKernels>(z).count_correct(z, labels, top, sum);
}

}  // namespace topknot
