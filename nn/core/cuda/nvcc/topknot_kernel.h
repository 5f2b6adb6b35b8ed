#pragma once
// What a .cu file is compiled against by nvcc: CUDA C++ itself, and launch(). Another header of this name
// lets the same files run on the CPU in tests (tests/cuda/emulator), so kernels keep to static shared memory
// and to the intrinsics that stand there.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "nn/core/cuda/check.h"

namespace topknot::cuda {

// The GPU's clock.
__device__ inline std::uint64_t global_nanoseconds() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Starts a kernel; throws CudaError if it cannot be started. `stream` is never the default stream.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream, A&&... arguments) {
  kernel<<<grid, block, 0, stream>>>(static_cast<P>(arguments)...);
  check_launch(reinterpret_cast<const void*>(kernel), grid.x, block.x);
}

}  // namespace topknot::cuda
