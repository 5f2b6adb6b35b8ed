#pragma once
// Batch normalisation's kernels (batch_norm.h says what is computed), over x as a matrix of rows = N H W pixels and
// `channels` columns, float or bfloat16. Sums are taken in a fixed order that depends on the shape alone: the same
// bits in every run and on every card. The arithmetic of a channel is the CPU's.
//
// Forward in training: sums, normalization, apply: x is read twice, y written once. Backward: backward_sums,
// coefficients, backward_apply.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "nn/base/host_device.h"

namespace topknot::cuda {

// How a matrix is cut: a block of kThreads has `lanes` threads side by side, each with `vector` columns, and goes
// through chunk_rows rows. The grid is column_tiles x chunks.
struct BatchNormTiles {
  std::int64_t rows = 0;
  unsigned channels = 0;
  bool bf16 = false;
  unsigned vector = 1;  // 16 bytes where the channels divide, else one element
  unsigned lanes = 1;   // a power of two, at most 32
  unsigned column_tiles = 1, chunks = 1;
  std::int64_t chunk_rows = 0;

  std::size_t elements() const { return static_cast<std::size_t>(rows) * channels; }
  // Of partial sums, in floats: [chunks][2][channels], and in the forward pass [chunks][channels] behind them, what was
  // subtracted from x.
  std::size_t partial_floats() const { return std::size_t{3} * chunks * channels; }
  TOPKNOT_HOST_DEVICE std::size_t shift(unsigned chunk) const {
    return (std::size_t{2} * chunks + chunk) * channels;
  }
};
// rows and channels are positive.
BatchNormTiles batch_norm_tiles(std::int64_t rows, std::int64_t channels, bool bf16);

// [channels] floats each, in GPU memory: what the forward pass normalised by, and y = scale x + shift.
struct BatchNormStatistics {
  float *mean = nullptr, *inverse_std = nullptr, *scale = nullptr, *shift = nullptr;
};

struct BatchNormParameters {
  const float *gamma = nullptr, *beta = nullptr;
  float *running_mean = nullptr, *running_variance = nullptr;
  float momentum = 0.1f, epsilon = 1e-5f;
};

// partial: sums of x - shift and of their squares, for each chunk, and the shift, a value near its mean.
void batch_norm_sums(cudaStream_t stream, const BatchNormTiles& tiles, const void* x, float* partial);
// From the sums; moves the running statistics. partial null: from those, unmoved.
void batch_norm_normalization(cudaStream_t stream, const BatchNormTiles& tiles, const float* partial,
                              const BatchNormParameters& parameters, const BatchNormStatistics& out);
// y = scale x + shift (+ residual, where not null), then max(0, .) where relu.
void batch_norm_apply(cudaStream_t stream, const BatchNormTiles& tiles, const void* x, const void* residual,
                      bool relu, const BatchNormStatistics& statistics, void* y);

// Where the forward pass ended with relu, a gradient counts where y > 0.
enum class BatchNormMask {
  none,
  recomputed,  // y is worked out again from x; there was no residual
  stored,      // y is read, and the masked gradient written, which may be over grad
};
// partial: sums of the masked gradient g, and of g (x - mean), for each chunk. y, masked: where stored.
void batch_norm_backward_sums(cudaStream_t stream, const BatchNormTiles& tiles, BatchNormMask mask,
                              const void* grad, const void* x, const void* y,
                              const BatchNormStatistics& statistics, void* masked, float* partial);
// The gradients of gamma and beta (null: not wanted), and dx = a g + b x + c: a, b, c in coefficients[3][channels].
// `training`: mean and variance depend on x.
struct BatchNormTarget {
  float* data = nullptr;
  bool accumulate = false;
};
void batch_norm_coefficients(cudaStream_t stream, const BatchNormTiles& tiles, const float* partial,
                             const float* gamma, const BatchNormStatistics& statistics, bool training,
                             BatchNormTarget dgamma, BatchNormTarget dbeta, float* coefficients);
// dx (+)= a g + (b x + c). With `recomputed` g is the gradient still to be masked, else it is masked.
void batch_norm_backward_apply(cudaStream_t stream, const BatchNormTiles& tiles, BatchNormMask mask,
                               const void* g, const void* x, const BatchNormStatistics& statistics,
                               const float* coefficients, void* dx, bool accumulate);

// Beside cuDNN's batch norm. y = y (+ residual), then max(0, .) where relu; in place.
void batch_norm_finish(cudaStream_t stream, const BatchNormTiles& tiles, void* y, const void* residual,
                       bool relu);
// masked = grad where y > 0, else 0; may be grad.
void batch_norm_mask(cudaStream_t stream, const BatchNormTiles& tiles, const void* grad, const void* y,
                     void* masked);

}  // namespace topknot::cuda
