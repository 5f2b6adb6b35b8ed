#pragma once
// The methods by which a GPU does batch_norm() in training; batch_norm.cpp times them and takes the
// fastest for each shape. Host code of the CUDA backend, on the current context's stream.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "nn/base/host_device.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {

// Their numbers stand in the files of Context::algorithm_cache().
enum class BatchNormKind {
  kernels,     // ours; the same bits in every run
  spatial,     // cuDNN's CUDNN_BATCHNORM_SPATIAL, then ours for the residual and relu
  persistent,  // cuDNN's CUDNN_BATCHNORM_SPATIAL_PERSISTENT, in the same way
  fused,       // that with the residual and relu done by cuDNN; bfloat16, channels a multiple of 4, relu
};
const char* name_of(BatchNormKind kind);

// What the backward pass needs beside the call.
struct BatchNormKept {
  Tensor y;                   // where the method reads it
  DeviceArray<float> values;  // the statistics, [C] each
  DeviceArray<std::byte> reserve;
};

// cuDNN does not do this shape in this way.
class BatchNormUnsupported : public CudaError {
 public:
  using CudaError::CudaError;
};

class BatchNormMethod {
 public:
  virtual ~BatchNormMethod() = default;
  virtual Tensor forward(const BatchNormArguments& call, BatchNormKept& kept) const = 0;
  // `grad` may be written over where it is the caller's alone.
  virtual void backward(const BatchNormArguments& call, const BatchNormKept& kept, Tensor grad,
                        BatchNormGradients& out) const = 0;
};

// For calls with an x of this shape and type, with or without a residual and relu; outside training for `kernels` only.
// Throws BatchNormUnsupported, as
// forward() and backward() may.
std::unique_ptr<BatchNormMethod> make_batch_norm_method(BatchNormKind kind, const BatchNormArguments& like);

// Our kernels (batch_norm.cu), over x as a matrix of rows = N H W pixels and
// `channels` columns, float or bfloat16. Sums are taken in a fixed order that depends on the shape alone: the same
// bits in every run and on every card. The arithmetic of a channel is the CPU's.
//
// Forward in training: sums, normalization, apply: x is read twice, y written once. Backward: backward_sums,
// coefficients, backward_apply.

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
