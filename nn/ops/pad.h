#pragma once
// Rows and columns of one value after an image: for paddings that a convolution or pooling, which pads alike on both
// sides, does not have (TensorFlow's SAME on an even side, Caffe's pooling that rounds up).

#include "nn/ops/kernels.h"

namespace topknot {

// [N, C, H, W] -> [N, C, H + rows, W + columns], x first, `value` elsewhere. Layout as x's.
Variable pad_end(const Variable& x, std::int64_t rows, std::int64_t columns, float value = 0);

struct PadKernels {
  static constexpr const char* op = "pad_end";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, float value, Tensor& y);
  void (*backward)(const Tensor& dy, Tensor& dx);  // dx = dy without the rows and columns
};

}  // namespace topknot
