#pragma once
// Kernels of global_average_pool(): x lies in N, pixels, C order. Float or, with bf16, bfloat16. C++17.

#include <cuda_runtime_api.h>

#include <cstdint>

namespace topknot::cuda {

struct AveragePoolShape {
  std::uint32_t images = 0, pixels = 0, channels = 0;
};

// y[n, c] = mean of x[n, ., c], summed in the order of the pixels, as on the CPU. No size is zero.
void average_pool_forward(cudaStream_t stream, bool bf16, const void* x, void* y, AveragePoolShape shape);
// dx[n, ., c] = dy[n, c] / pixels
void average_pool_backward(cudaStream_t stream, bool bf16, const void* dy, void* dx, AveragePoolShape shape);

}  // namespace topknot::cuda
