#pragma once
// Kernels of frames_to_rows and mask_frames.

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

// to = from with zeros in the frames t >= frames[n] of sequence n; in T, N, C order (`rows`, height 1), or in N, H, T, C.
void mask_frames(cudaStream_t stream, bool rows, const void* from, const std::int32_t* frames, void* to,
                 const FramesShape& shape, std::size_t element);

}  // namespace topknot::cuda
