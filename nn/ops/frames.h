#pragma once
// Between pictures of sound, [N, C, H, T], and rows of features, one per frame: what comes before and after recurrent layers.

#include <cstdint>
#include <span>

#include "nn/ops/kernels.h"

namespace topknot {

// [N, C, H, T] -> [T * N, C * H], frame by frame: row t * N + n has x[n, :, :, t], in the order C, H.
Variable frames_to_rows(const Variable& x);

// x with zeros in the frames behind a sequence's own: frames[n], 0 to T, of sequence n, on x's device and there until the
// backward pass has been. x is [N, C, H, T], or rows [T * N, F] in the order of frames_to_rows(). With no `frames` x itself.
Variable mask_frames(const Variable& x, std::span<const std::int32_t> frames);

// [M, F] -> [M, F, 1, 1], in the device's layout of activations, for ops on channels; flatten() is the way back.
Variable rows_to_images(const Variable& x);

struct FramesKernels {
  static constexpr const char* op = "frames_to_rows";
  // x [N, C, H, T] in a layout of its device; rows [T * N, C * H].
  void (*gather)(const Tensor& x, Tensor& rows);
  void (*scatter)(const Tensor& rows, Tensor& x);  // the reverse
};

struct MaskFramesKernels {
  static constexpr const char* op = "mask_frames";
  static constexpr bool cpu_bfloat16 = true;
  void (*mask)(const Tensor& x, std::span<const std::int32_t> frames, Tensor& y);
};

}  // namespace topknot
