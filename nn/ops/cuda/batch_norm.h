#pragma once
// The methods by which a GPU does batch_norm() in training; a trial in batch_norm.cpp takes the fastest
// for each shape. Host code of the CUDA backend, on the current context's stream.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "nn/base/host_device.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {

// The candidates of a trial (nn/core/cuda/trial.h), by their names.
enum class BatchNormKind {
  kernels,     // ours; the same bits in every run
  spatial,     // cuDNN's CUDNN_BATCHNORM_SPATIAL, then ours for the residual and relu
  persistent,  // cuDNN's CUDNN_BATCHNORM_SPATIAL_PERSISTENT, in the same way
  fused,       // that with the residual and relu done by cuDNN; bfloat16, channels a multiple of 4, relu
};
inline constexpr int kBatchNormKinds = 4;
const char* name_of(BatchNormKind kind);

// The forward pass's state for the backward pass, besides the call.
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
  // `grad` may be written over if it is the caller's alone.
  virtual void backward(const BatchNormArguments& call, const BatchNormKept& kept, Tensor grad,
                        BatchNormGradients& out) const = 0;
};

// For calls with an x of this shape and type, with or without a residual and relu; outside training for
// `kernels` only. Throws BatchNormUnsupported, as forward() and backward() may.
std::unique_ptr<BatchNormMethod> make_batch_norm_method(BatchNormKind kind, const BatchNormArguments& like);

// Ours, in batch_norm.cu, for any shape and outside training too. Sums are taken in a fixed order that
// depends on the shape alone: the same bits in every run and on every card.
std::unique_ptr<BatchNormMethod> make_kernel_batch_norm();

// How a matrix is cut: a block of kThreads has `lanes` threads side by side, each with `vector` columns, and
// goes through chunk_rows rows. The grid is column_tiles x chunks.
struct BatchNormTiles {
  std::int64_t rows = 0;
  unsigned channels = 0;
  bool bf16 = false;
  unsigned vector = 1;  // 16 bytes if the channels divide, else one element
  unsigned lanes = 1;   // a power of two, at most 32
  unsigned column_tiles = 1, chunks = 1;
  std::int64_t chunk_rows = 0;

  TOPKNOT_HOST_DEVICE unsigned tile_channels() const { return lanes * vector; }
  // The size of the partial sums, in floats: [chunks][2][channels], and in the forward pass
  // [chunks][channels] after them, what was subtracted from x.
  std::size_t partial_floats() const { return std::size_t{3} * chunks * channels; }
  TOPKNOT_HOST_DEVICE std::size_t shift(unsigned chunk) const {
    return (std::size_t{2} * chunks + chunk) * channels;
  }
};
// rows and channels are positive.
BatchNormTiles batch_norm_tiles(std::int64_t rows, std::int64_t channels, bool bf16);

// Beside cuDNN's batch norm. y = y (+ residual, where defined), then max(0, .) where relu; in place.
void batch_norm_finish(Tensor& y, const Tensor& residual, bool relu);
// masked = grad where y > 0, else 0; may be grad.
void batch_norm_mask(const Tensor& grad, const Tensor& y, Tensor& masked);

}  // namespace topknot::cuda
