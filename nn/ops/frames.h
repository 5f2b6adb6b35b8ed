#pragma once
// Between pictures of sound, [N, C, H, T], and rows of features, one per frame: what comes before and after recurrent layers.

#include "nn/ops/kernels.h"

namespace topknot {

// [N, C, H, T] -> [T * N, C * H], frame by frame: row t * N + n has x[n, :, :, t], in the order C, H.
Variable frames_to_rows(const Variable& x);

// [M, F] -> [M, F, 1, 1], in the device's layout of activations, for ops on channels; flatten() is the way back.
Variable rows_to_images(const Variable& x);

struct FramesKernels {
  static constexpr const char* op = "frames_to_rows";
  // x [N, C, H, T] in a layout of its device; rows [T * N, C * H].
  void (*gather)(const Tensor& x, Tensor& rows);
  void (*scatter)(const Tensor& rows, Tensor& x);  // the reverse
};

}  // namespace topknot
