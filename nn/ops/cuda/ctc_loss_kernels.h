#pragma once
// Kernels of ctc_loss. Logits and outputs are float or, with bf16, bfloat16; all else in double.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "nn/base/host_device.h"

namespace topknot::cuda {

// N sequences of T frames, frame by frame, as ctc_loss() of nn/ops/ctc_loss.h takes them.
struct CtcBatch {
  const void* logits;  // [T * N, classes]
  bool bf16;
  std::int64_t frames, sequences, classes, longest;
  const std::int32_t *labels, *lengths, *frame_counts;
  std::int32_t blank;

  TOPKNOT_HOST_DEVICE std::int64_t states() const { return 2 * longest + 1; }
};

// log_sums [T * N]: of each row's softmax. alpha [N, T, states], scratch [N, 2, states]. losses [N] = -log p, NaN where the
// targets are out of range or longer than their frames allow. With `dz` (null: not wanted) [T * N, classes], f32: the
// gradient of their sum.
void ctc_loss_forward(cudaStream_t stream, const CtcBatch& batch, double* log_sums, double* alpha,
                      double* scratch, double* losses, float* dz);
// out = dz grad[0] / sequences
void ctc_loss_backward(cudaStream_t stream, const float* dz, std::int64_t n, bool bf16,
                       std::int64_t sequences, const float* grad, void* out);

}  // namespace topknot::cuda
