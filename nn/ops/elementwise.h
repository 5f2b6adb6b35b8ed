#pragma once
// Ops on single elements.

#include "nn/core/rng.h"
#include "nn/ops/activation_rule.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable relu(const Variable& x);  // max(0, x); a NaN stays one

Variable clamp(const Variable& x, float low, float high);  // min(max(x, low), high): hardtanh
inline Variable relu6(const Variable& x) {
  return clamp(x, 0.0f, 6.0f);
}
Variable hardswish(const Variable& x);  // x relu6(x + 3) / 6
Variable sigmoid(const Variable& x);    // s(x) = 1 / (1 + e^-x)
Variable silu(const Variable& x);       // x s(x)

// a + b, of one shape; layouts and types may differ, the result has a's.
Variable add(const Variable& a, const Variable& b);

// Each element is zeroed with probability p, the others are divided by 1 - p (inverted dropout); p in [0, 1). The i-th
// element in N, C, H, W order takes the i-th number of `rng`, for any layout, thread count and device. `step`, where not
// null, is a word in GPU memory that replaces the first number of the stream (CounterRng's a), so that a captured graph
// draws new numbers in each step; for a GPU only.
Variable dropout(const Variable& x, float p, const CounterRng& rng, const std::uint32_t* step = nullptr);

struct ReluKernels {
  static constexpr const char* op = "relu";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, Tensor& y);
  void (*backward)(const Tensor& y, const Tensor& dy,
                   Tensor& dx);  // dx = dy where y > 0, else 0; dx may be dy
};

struct ActivationKernels {
  static constexpr const char* op = "an activation function";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const ActivationRule& rule, const Tensor& x, Tensor& y);
  void (*backward)(const ActivationRule& rule, const Tensor& x, const Tensor& dy,
                   Tensor& dx);  // dx = dy slope(x); dx may be dy
};

struct DropoutKernels {
  static constexpr const char* op = "dropout";
  static constexpr bool cpu_bfloat16 = true;
  // The mask of a tensor of x's shape and layout, and t times that mask.
  OpState (*mask)(const Tensor& x, float p, const CounterRng& rng, const std::uint32_t* step);
  Tensor (*times_mask)(const Tensor& t, const OpState& mask);
};

}  // namespace topknot
