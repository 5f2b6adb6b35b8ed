#include "nn/ops/ctc_loss.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/ctc_loss_kernels.h"
#include "nn/ops/cuda/loss_kernels.h"

namespace topknot::cuda {
namespace {

void forward(const Tensor& logits, const CtcTargets& targets, std::int32_t blank, Tensor& loss, Tensor& dz) {
  const cudaStream_t stream = Context::current().stream();
  const auto n = static_cast<std::int64_t>(targets.lengths.size());
  const CtcBatch batch = {logits.data(),         logits.dtype() == DType::bf16,
                          logits.dim(0) / n,     n,
                          logits.dim(1),         static_cast<std::int64_t>(targets.labels.size()) / n,
                          targets.labels.data(), targets.lengths.data(),
                          targets.frames.data(), blank};
  const auto words = [](std::int64_t count) { return DeviceArray<double>(static_cast<std::size_t>(count)); };
  const DeviceArray<double> log_sums = words(logits.dim(0)), alpha = words(logits.dim(0) * batch.states()),
                            scratch = words(2 * n * batch.states()), losses = words(n);
  ctc_loss_forward(stream, batch, log_sums.data(), alpha.data(), scratch.data(), losses.data(),
                   dz.defined() ? dz.data() : nullptr);
  mean_of(stream, losses.data(), losses.size(), static_cast<double>(n), loss.data());
}

void backward(const Tensor& dz, std::int64_t sequences, const Tensor& grad, Tensor& out) {
  ctc_loss_backward(Context::current().stream(), dz.data(), dz.numel(), out.dtype() == DType::bf16, sequences,
                    grad.data(), out.data());
}

const RegisterKernels<CtcKernels> ctc_registered(DeviceKind::cuda,
                                                 {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
