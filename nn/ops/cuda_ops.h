#pragma once
// The ops on a GPU. Each public op of this folder checks its shapes and, where its input is on a GPU, hands over to
// the function of the same name here: nn/ops/cuda, x.cpp with cuDNN and cuBLAS, x.cu with kernels of our own; a build
// without CUDA has cuda_ops_stub.cpp. Four-dimensional activations are nhwc, others plain; both f32, or bf16 under
// Precision::bf16. Parameters are f32 in the arena's layout (OIHW), and so are their gradients. Losses are f32.

#include <cstdint>
#include <span>

#include "nn/core/autograd.h"
#include "nn/core/rng.h"
#include "nn/ops/batch_norm.h"
#include "nn/ops/conv2d.h"
#include "nn/ops/pool.h"

namespace topknot {

inline bool on_gpu(const Variable& x) {
  return x.value().device().kind == DeviceKind::cuda;
}

}  // namespace topknot

namespace topknot::cuda {

Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias,
                const ConvGeometry& geometry);
Variable linear(const Variable& x, const Variable& weight, const Variable& bias);

Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, const Variable& residual,
                    const BatchNormState& state, const BatchNormOptions& options);
Variable pool(const Variable& x, const PoolGeometry& geometry);
Variable global_average_pool(const Variable& x);

// `labels`: N of them, int32, in GPU memory that outlives the backward pass.
Variable softmax_cross_entropy(const Variable& logits, const std::int32_t* labels);
Variable mean_squared_error(const Variable& y, const Tensor& target);  // target: f32, plain, on the GPU
// sums[0] += the rows of logits [N, classes] whose first maximum is their label; labels and sums in GPU memory.
void count_correct(const Tensor& logits, const std::int32_t* labels, double* sums);

Variable relu(const Variable& x);
Variable add(const Variable& a, const Variable& b);
// As dropout() of nn/ops/elementwise.h, from the same numbers. `step`, where not null, is a word in GPU memory that
// takes the place of the stream's first number (CounterRng's a), so that a graph draws anew in each step.
Variable dropout(const Variable& x, float p, const CounterRng& rng, const std::uint32_t* step = nullptr);
Variable subsample_and_pad(const Variable& x, std::int64_t channels);
Variable flatten(const Variable& x);

// A host's or the GPU's plain f32 images as the activation that the first layer takes: nhwc, in the context's type.
// Other shapes become activations as they are. No gradient.
Tensor to_activation(const Tensor& images);
// The f32, plain form of an activation, on the GPU.
Tensor to_plain(const Tensor& x);

}  // namespace topknot::cuda
