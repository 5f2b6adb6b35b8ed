#pragma once
// The kernel of concat, slice_channels and channel_shuffle on a GPU.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace topknot::cuda {

// In N, H, W, C order: channels from + i from_step of x, which has from_channels, become channels to + i to_step of y, for
// i < count, in each of `rows` pixels; with `accumulate` they are added. Fewer than 2^32 elements.
struct ChannelCopy {
  std::uint32_t rows, count, from_channels, from, from_step, to_channels, to, to_step;
};
void copy_channels(cudaStream_t stream, bool bf16, const void* x, void* y, ChannelCopy copy, bool accumulate);

}  // namespace topknot::cuda
