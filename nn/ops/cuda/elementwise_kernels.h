#pragma once
// Kernels of relu and dropout. Tensors are float or, with `bf16`, bfloat16; arithmetic is in float. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "nn/core/philox.h"

namespace topknot::cuda {

// y = max(0, x), where a NaN stays one
void relu_forward(cudaStream_t stream, bool bf16, const void* x, void* y, std::size_t n);
// dx = dy where y > 0, else 0; dx may be dy
void relu_backward(cudaStream_t stream, bool bf16, const void* y, const void* dy, void* dx, std::size_t n);

// Which of a stream's numbers an element takes: its place in N, C, H, W order. pixels == 1: as it lies in memory;
// else the tensor lies in N, H, W, C order.
struct DropoutShape {
  std::uint32_t channels = 1, pixels = 1;
};

// out = in * (number < p ? 0 : keep), fewer than 2^32 elements. `step`, where not null, takes the place of rng.a.
void dropout_mask(cudaStream_t stream, bool bf16, const void* in, void* out, std::size_t n,
                  DropoutShape shape, float p, float keep, const PhiloxStream& rng,
                  const std::uint32_t* step);

}  // namespace topknot::cuda
