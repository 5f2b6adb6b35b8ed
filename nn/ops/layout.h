#pragma once
// Layouts and types of activations.

#include "nn/ops/kernels.h"

namespace topknot {

// The same values in another layout and type; the same tensor where both are x's. bfloat16 is rounded to nearest, ties
// to even.
Tensor in_form(const Tensor& x, Layout layout, DType type);
inline Tensor to_layout(const Tensor& x, Layout layout) {
  return in_form(x, layout, x.dtype());
}

// The same values in another type, and so the gradient.
Variable cast(const Variable& x, DType type);

// For ops whose CPU kernels take f32 alone: true where x is in memory of a CPU and bf16. Then the op casts its input, and
// its value back.
bool needs_f32(const Variable& x);

// [N, C, H, W] or [N, F] -> [N, C * H * W], in that order.
Variable flatten(const Variable& x);

struct LayoutKernels {
  static constexpr const char* op = "a change of layout";
  static constexpr bool cpu_bfloat16 = true;
  // `layout` or `type` differs from x's. The layouts are plain and, on a CPU, blocked or, on a GPU, nhwc.
  Tensor (*convert)(const Tensor& x, Layout layout, DType type);
};

}  // namespace topknot
