#pragma once
// Kernels that pass once over activations: another order or type, relu, dropout, the shortcut that takes every second
// pixel, the mean of whole images. Tensors are float or, with `bf16`, bfloat16; arithmetic is in float.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "nn/core/rng.h"
#include "nn/ops/activation_rule.h"

namespace topknot::cuda {

// `images` matrices of rows x columns become columns x rows: N, C, H * W to N, H * W, C and back. Types are float or,
// with bf16, bfloat16 (to nearest, ties to even).
void transpose(cudaStream_t stream, const void* in, bool in_bf16, void* out, bool out_bf16,
               std::size_t images, std::size_t rows, std::size_t columns);
// n elements in another type.
void convert(cudaStream_t stream, const void* in, bool in_bf16, void* out, bool out_bf16, std::size_t n);

// Of subsample_and_pad(): both images lie in N, H, W, C order.
struct ShortcutShape {
  std::uint32_t images, height,
      width;  // of the large images; the small ones have (height + 1) / 2, (width + 1) / 2
  std::uint32_t narrow, wide,
      shift;  // channels of the large and of the small images; the first that is not zero
};
// Elements of `element` bytes, 2 or 4; fewer than 2^32 of them.
void subsample_forward(cudaStream_t stream, const void* x, void* y, ShortcutShape shape, std::size_t element);
void subsample_backward(cudaStream_t stream, const void* dy, void* dx, ShortcutShape shape,
                        std::size_t element);

// y = max(0, x), where a NaN stays one
void relu_forward(cudaStream_t stream, bool bf16, const void* x, void* y, std::size_t n);
// dx = dy where y > 0, else 0; dx may be dy
void relu_backward(cudaStream_t stream, bool bf16, const void* y, const void* dy, void* dx, std::size_t n);

// y = value(x); dx = dy slope(x), where dx may be dy
void activation_forward(cudaStream_t stream, bool bf16, const ActivationRule& rule, const void* x, void* y,
                        std::size_t n);
void activation_backward(cudaStream_t stream, bool bf16, const ActivationRule& rule, const void* x,
                         const void* dy, void* dx, std::size_t n);

// Which of a stream's numbers an element takes: its place in N, C, H, W order. pixels == 1: as it lies in memory;
// else the tensor lies in N, H, W, C order.
struct DropoutShape {
  std::uint32_t channels = 1, pixels = 1;
};

// out = in * (number < p ? 0 : keep), fewer than 2^32 elements. `step`, where not null, takes the place of rng.a.
void dropout_mask(cudaStream_t stream, bool bf16, const void* in, void* out, std::size_t n,
                  DropoutShape shape, float p, float keep, const PhiloxStream& rng,
                  const std::uint32_t* step);

// Of global_average_pool(): x lies in N, pixels, C order. No size is zero.
struct AveragePoolShape {
  std::uint32_t images = 0, pixels = 0, channels = 0;
};

// y[n, c] = mean of x[n, ., c], summed in the order of the pixels, as on the CPU.
void average_pool_forward(cudaStream_t stream, bool bf16, const void* x, void* y, AveragePoolShape shape);
// dx[n, ., c] = dy[n, c] / pixels
void average_pool_backward(cudaStream_t stream, bool bf16, const void* dy, void* dx, AveragePoolShape shape);

}  // namespace topknot::cuda
