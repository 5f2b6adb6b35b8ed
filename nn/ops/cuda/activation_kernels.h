#pragma once
// Kernels that bring activations into another order or type, and the shortcut that takes every second pixel. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

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

}  // namespace topknot::cuda
