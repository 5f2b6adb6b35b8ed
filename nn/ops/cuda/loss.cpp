// The losses on a GPU: a scalar in its memory, which the host does not wait for.
#include "nn/ops/loss.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/loss_kernels.h"

namespace topknot::cuda {
namespace {

Rows rows_of(const Tensor& x) {
  return {x.data(), x.dtype() == DType::bf16, x.dim(0), x.dim(1)};
}

struct Softmax {
  DeviceArray<SoftmaxRow> rows;
  const std::int32_t* labels;
  DeviceArray<double> counted{1};  // rows that are not masked
};

OpState forward(const Tensor& logits, std::span<const std::int32_t> labels, float smoothing, Tensor& loss) {
  const std::size_t n = labels.size();
  const cudaStream_t stream = Context::current().stream();
  const auto softmax = std::make_shared<Softmax>(Softmax{DeviceArray<SoftmaxRow>(n), labels.data()});
  const DeviceArray<double> losses(n);
  cross_entropy_rows(stream, rows_of(logits), labels.data(), smoothing, softmax->rows.data(), losses.data());
  mean_of_unmasked(stream, losses.data(), labels.data(), n, softmax->counted.data(), loss.data());
  return softmax;
}

void backward(const Tensor& logits, const OpState& state, float smoothing, const Tensor& grad, Tensor& dz) {
  const auto& softmax = state_as<Softmax>(state);
  cross_entropy_backward(Context::current().stream(), rows_of(logits), softmax.labels, smoothing,
                         softmax.rows.data(), softmax.counted.data(), grad.data(), dz.data());
}

void count_correct(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum) {
  const cudaStream_t stream = Context::current().stream();
  const DeviceArray<double> hits(labels.size());
  count_hits(stream, rows_of(logits), labels.data(), top, hits.data());
  add_sum(stream, hits.data(), hits.size(), sum);
}

void squared_error_forward(const Tensor& y, const Tensor& target, Tensor& loss) {
  const auto n = static_cast<std::size_t>(y.numel());
  const cudaStream_t stream = Context::current().stream();
  const DeviceArray<double> partial(squared_error_blocks(n));
  squared_error(stream, y.dtype() == DType::bf16, y.data(), target.data(), n, partial.data());
  mean_of(stream, partial.data(), partial.size(), static_cast<double>(n), loss.data());
}

void squared_error_gradient(const Tensor& y, const Tensor& target, const Tensor& grad, Tensor& dy) {
  squared_error_backward(Context::current().stream(), y.dtype() == DType::bf16, y.data(), target.data(),
                         static_cast<std::size_t>(y.numel()), grad.data(), dy.data());
}

const RegisterKernels<CrossEntropyKernels> cross_entropy_kernels(
    DeviceKind::cuda, {.forward = forward, .backward = backward, .count_correct = count_correct});
const RegisterKernels<SquaredErrorKernels> squared_error_kernels(DeviceKind::cuda,
                                                                 {.forward = squared_error_forward,
                                                                  .backward = squared_error_gradient});

}  // namespace
}  // namespace topknot::cuda
