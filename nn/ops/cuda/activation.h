#pragma once
// Between the layouts and types that activations have on a GPU.

#include "nn/core/tensor.h"

namespace topknot::cuda {

// The same values in this layout and type, on the current context's stream; the same tensor where nothing is to be
// done. `x` lies on the GPU; bfloat16 is rounded to nearest, ties to even.
Tensor in_form(const Tensor& x, Layout layout, DType type);

}  // namespace topknot::cuda
