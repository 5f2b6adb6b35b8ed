#pragma once
// What clipping on the CPU (optim/clip.cpp) and on the GPU (optim/cuda/clip.cu) share. C++17.

#include <cfloat>
#include <cstddef>

#include "nn/core/host_device.h"

namespace topknot {

// A sum of squares goes by blocks of so many values; in a block, lane l adds up the values l, l + kClipLanes, ... in
// order; the lanes of a block are added in order, and then the blocks.
inline constexpr std::size_t kClipBlock = 1 << 13;
inline constexpr std::size_t kClipLanes = 16;

TOPKNOT_HOST_DEVICE double clip_factor_of(double norm, double max_norm) {
  return norm <= DBL_MAX && norm > max_norm ? max_norm / norm : 1.0;
}

}  // namespace topknot
