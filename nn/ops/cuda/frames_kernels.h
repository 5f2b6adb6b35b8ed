#pragma once
// Kernels of frames_to_rows. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace topknot::cuda {

struct FramesShape {
  std::int64_t images, channels, height, frames;
};

// x lies in N, H, T, C order, rows in T, N, C, H order; elements of `element` bytes, 2 or 4. `gather`: from x to rows, else
// back.
void move_frames(cudaStream_t stream, bool gather, const void* from, void* to, const FramesShape& shape,
                 std::size_t element);

}  // namespace topknot::cuda
