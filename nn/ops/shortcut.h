#pragma once
// The parameter-free shortcut of He et al., "Deep residual learning for image recognition", CVPR 2016,
// section 4.2, option A: every second pixel, and zero channels on both sides to reach the wider layer.

#include "nn/ops/kernels.h"

namespace topknot {

// [N, C, H, W] -> [N, channels, ceil(H / 2), ceil(W / 2)]; channels - C zero channels, half of them first.
// Layout as x's.
Variable subsample_and_pad(const Variable& x, std::int64_t channels);

struct ShortcutKernels {
  static constexpr const char* op = "subsample_and_pad";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, Tensor& y);
  void (*backward)(const Tensor& dy, Tensor& dx);  // the transpose: pixels that were left out get zero
};

}  // namespace topknot
