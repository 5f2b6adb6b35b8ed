#include "nn/ops/cuda/channel_bias.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/conv_layout.h"

namespace topknot::cuda {
namespace {

struct Rows {
  std::size_t rows, channels;
  explicit Rows(const Tensor& y)
      : rows(static_cast<std::size_t>(y.numel() / y.dim(1))), channels(static_cast<std::size_t>(y.dim(1))) {}
};

}  // namespace

void add_bias(Tensor& y, const Variable& bias) {
  const Rows of(y);
  add_bias(Context::current().stream(), y.data(), y.dtype() == DType::bf16, bias.value().data(), of.rows,
           of.channels);
}

void bias_gradient(const Tensor& grad, const Variable& bias) {
  const GradientTarget target = bias.gradient_target();
  if (!target.data) return;
  const Rows of(grad);
  const DeviceArray<float> scratch(column_sums_scratch(of.rows, of.channels));
  column_sums(Context::current().stream(), grad.data(), grad.dtype() == DType::bf16, of.rows, of.channels,
              scratch.data(), target.data, target.accumulate);
}

}  // namespace topknot::cuda
