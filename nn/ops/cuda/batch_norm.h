#pragma once
// The methods by which a GPU does batch norm (nn/ops/batch_norm.h) in training; batch_norm.cpp times them and takes the
// fastest for each shape. Host code of the CUDA backend, on the current context's stream.

#include <memory>
#include <string>

#include "nn/core/cuda/context.h"
#include "nn/ops/batch_norm.h"
#include "nn/ops/cuda/batch_norm_kernels.h"

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

}  // namespace topknot::cuda
