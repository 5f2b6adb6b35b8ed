#pragma once
// The kernels of scale_channels on a GPU: x lies in N, pixels, C order, s is [N, C].

#include <cuda_runtime_api.h>

#include <cstdint>

namespace topknot::cuda {

struct ScaleShape {
  std::uint32_t images, pixels, channels;  // fewer than 2^32 elements
};
void scale_channels(cudaStream_t stream, bool bf16, const void* x, const void* s, void* y, ScaleShape shape);
// Summed in the order of the pixels, as on the CPU.
void scale_gradient(cudaStream_t stream, bool bf16, const void* x, const void* dy, void* ds,
                    ScaleShape shape);

}  // namespace topknot::cuda
