#pragma once
// What clipping on the CPU (optim/clip.cpp) and on the GPU (optim/clip.cu) share.

#include <cfloat>
#include <cstddef>

#include "nn/base/host_device.h"
#include "nn/core/step.h"

namespace topknot {

// A sum of squares goes by blocks of so many values; in a block, lane l adds up the values l, l + kClipLanes, ... in
// order; the lanes of a block are added in order, and then the blocks.
inline constexpr std::size_t kClipBlock = 1 << 13;
inline constexpr std::size_t kClipLanes = 16;

// By device, as the members of Clip (optim/clip.h) of these names. `blocks`: a double for each kClipBlock values begun.
struct ClipKernels {
  void (*sum_of_squares)(const float* values, std::size_t n, double* blocks, double* sum, bool add);
  void (*scale)(float* values, std::size_t n, const double* sum, double max_norm);
  void (*set_gradient_scale)(const double* sum, double max_norm, StepParameters* parameters);
};

TOPKNOT_HOST_DEVICE double clip_factor_of(double norm, double max_norm) {
  return norm <= DBL_MAX && norm > max_norm ? max_norm / norm : 1.0;
}

}  // namespace topknot
