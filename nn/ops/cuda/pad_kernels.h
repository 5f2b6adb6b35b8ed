#pragma once
// The kernels of pad_end on a GPU.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace topknot::cuda {

// Images of height x width and of large_height x large_width, in N, H, W, C order; fewer than 2^32 elements.
struct PadShape {
  std::uint32_t images, channels, height, width, large_height, large_width;
};
void pad_forward(cudaStream_t stream, bool bf16, const void* x, void* y, PadShape shape, float value);
void pad_backward(cudaStream_t stream, bool bf16, const void* dy, void* dx, PadShape shape);

}  // namespace topknot::cuda
