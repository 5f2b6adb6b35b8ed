// The losses on a GPU: a scalar in its memory, nothing the host waits for.
#include "nn/core/base/check.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/loss_kernels.h"
#include "nn/ops/cuda_ops.h"

namespace topknot::cuda {
namespace {

Rows rows_of(const char* op, const Tensor& x) {
  TOPKNOT_CHECK(x.shape().rank() == 2 && x.numel() > 0,
                std::string(op) + ": logits must be [N, classes], not " + x.shape().str());
  return {x.data(), x.dtype() == DType::bf16, x.dim(0), x.dim(1)};
}

Tensor scalar(const Tensor& like) {
  return Tensor::empty({1}, Layout::plain, like.device());
}

}  // namespace

Variable softmax_cross_entropy(const Variable& logits, const std::int32_t* labels) {
  const Rows rows = rows_of("softmax_cross_entropy", logits.value());
  const auto n = static_cast<std::size_t>(rows.rows);
  const cudaStream_t stream = Context::current().stream();
  const DeviceArray<SoftmaxRow> softmax(n);
  const DeviceArray<double> losses(n);
  cross_entropy_rows(stream, rows, labels, softmax.data(), losses.data());
  Tensor loss = scalar(logits.value());
  mean_of(stream, losses.data(), n, static_cast<double>(n), loss.data());
  return {"softmax_cross_entropy", loss, {logits}, [=](Tensor grad) {
            Tensor dz = Tensor::empty_like(logits.value());
            cross_entropy_backward(Context::current().stream(), rows, labels, softmax.data(), grad.data(),
                                   dz.data());
            logits.accumulate_grad(std::move(dz));
          }};
}

Variable mean_squared_error(const Variable& y, const Tensor& target) {
  const Tensor& out = y.value();
  TOPKNOT_CHECK(out.shape() == target.shape() && out.numel() > 0,
                "mean_squared_error: " + out.shape().str() + " against " + target.shape().str());
  TOPKNOT_CHECK(
      out.layout() == target.layout() && target.dtype() == DType::f32 && target.device() == out.device(),
      "mean_squared_error: a target in f32 on the same GPU and in the same layout");
  const auto n = static_cast<std::size_t>(out.numel());
  const bool bf16 = out.dtype() == DType::bf16;
  const cudaStream_t stream = Context::current().stream();
  const DeviceArray<double> partial(squared_error_blocks(n));
  squared_error(stream, bf16, out.data(), target.data(), n, partial.data());
  Tensor loss = scalar(out);
  mean_of(stream, partial.data(), partial.size(), static_cast<double>(n), loss.data());
  return {"mean_squared_error", loss, {y}, [=](Tensor grad) {
            Tensor dy = Tensor::empty_like(y.value());
            squared_error_backward(Context::current().stream(), bf16, y.value().data(), target.data(), n,
                                   grad.data(), dy.data());
            y.accumulate_grad(std::move(dy));
          }};
}

void count_correct(const Tensor& logits, const std::int32_t* labels, double* sums) {
  const Rows rows = rows_of("count_correct", logits);
  const cudaStream_t stream = Context::current().stream();
  const DeviceArray<double> hits(static_cast<std::size_t>(rows.rows));
  count_hits(stream, rows, labels, hits.data());
  add_sum(stream, hits.data(), hits.size(), sums);
}

}  // namespace topknot::cuda
