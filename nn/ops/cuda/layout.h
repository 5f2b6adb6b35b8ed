#pragma once
// Tensors in and out of the form that a GPU's ops take.

#include <cuda_runtime_api.h>

#include "nn/ops/kernels.h"

namespace topknot::cuda {

// Plain f32 images of the host or of this GPU as the first layer takes them: nhwc, in the context's type.
// Tensors of other ranks stay plain. On the current context's stream; a copy from the host blocks.
Tensor to_activation(const Tensor& images);
// The f32, plain form of an activation, on the GPU.
Tensor to_plain(const Tensor& x);

// n elements of float or, with bf16, bfloat16 in another type; rounded to nearest, ties to even.
void convert(cudaStream_t stream, const void* in, bool in_bf16, void* out, bool out_bf16, std::size_t n);

}  // namespace topknot::cuda
