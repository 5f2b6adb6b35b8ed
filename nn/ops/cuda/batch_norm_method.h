#pragma once
// The ways in which a GPU does batch norm (batch_norm.h) in training; nn/ops/cuda/batch_norm.cpp picks the quickest for each
// shape. Host code of the CUDA backend, on the current context's stream.

#include <memory>
#include <string>

#include "nn/core/autograd.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/batch_norm_gpu.h"

namespace topknot::cuda {

enum class BatchNormKind {
  kernels,     // ours; the same bits in every run
  spatial,     // cuDNN's CUDNN_BATCHNORM_SPATIAL, then ours for the residual and relu
  persistent,  // cuDNN's CUDNN_BATCHNORM_SPATIAL_PERSISTENT, in the same way
  fused,       // that with the residual and relu done by cuDNN; bfloat16, channels a multiple of 4, relu
};
const char* name_of(BatchNormKind kind);

// A forward pass: x nhwc; residual as x, or undefined.
struct BatchNormCall {
  Tensor x, residual;
  BatchNormParameters parameters;  // in GPU memory
  bool relu = false;
  bool training = true;  // false, batch norm with the running statistics: for `kernels` only
};

// What the backward pass needs beside the call.
struct BatchNormKept {
  Tensor y;                   // where the method reads it
  DeviceArray<float> values;  // the statistics, [C] each
  DeviceArray<std::byte> reserve;
};

struct BatchNormGradients {
  GradientTarget gamma{}, beta{};  // data null: not wanted
  InputGradient x;                 // undefined: not wanted
  bool want_residual = false;
  Tensor residual;  // out
};

// cuDNN does not do this shape in this way.
class BatchNormRefused : public CudaError {
 public:
  using CudaError::CudaError;
};

class BatchNormMethod {
 public:
  virtual ~BatchNormMethod() = default;
  virtual Tensor forward(const BatchNormCall& call, BatchNormKept& kept) const = 0;
  // `grad` may be written over where it is the caller's alone.
  virtual void backward(const BatchNormCall& call, const BatchNormKept& kept, Tensor grad,
                        BatchNormGradients& out) const = 0;
};

// For calls with an x of this shape and type, with or without a residual and relu. Throws BatchNormRefused, as
// forward() and backward() may.
std::unique_ptr<BatchNormMethod> make_batch_norm_method(BatchNormKind kind, const BatchNormCall& like);
std::unique_ptr<BatchNormMethod> make_cudnn_batch_norm(BatchNormKind kind, const BatchNormCall& like);

// Whether cuDNN reads parameters in vectors is not documented, so it gets aligned ones only.
inline bool aligned_for_cudnn(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}
inline bool aligned_parameters(const BatchNormCall& call) {
  const BatchNormParameters& p = call.parameters;
  return aligned_for_cudnn(p.gamma) && aligned_for_cudnn(p.beta) && aligned_for_cudnn(p.running_mean) &&
         aligned_for_cudnn(p.running_variance);
}

inline BatchNormTiles batch_norm_tiles(const Tensor& x) {
  return batch_norm_tiles(x.numel() / x.dim(1), x.dim(1), x.dtype() == DType::bf16);
}

}  // namespace topknot::cuda
