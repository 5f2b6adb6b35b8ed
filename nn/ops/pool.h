#pragma once
// Pooling over square windows and over whole images.

#include "nn/ops/kernels.h"

namespace topknot {

enum class PoolKind {
  max,      // the gradient goes to the window's first maximum; oneDNN passes over a NaN in the window
  average,  // of the elements inside the image: padding is not counted
};

struct PoolGeometry {
  PoolKind kind = PoolKind::max;
  std::int64_t window = 2, stride = 2, padding = 0;
  std::int64_t output_size(std::int64_t size) const { return (size + 2 * padding - window) / stride + 1; }
  auto operator<=>(const PoolGeometry&) const = default;
};

// [N, C, H, W] -> [N, C, output_size(H), output_size(W)]; throws Error for a window larger than the padded image.
Variable pool(const Variable& x, const PoolGeometry& geometry);

// [N, C, H, W] -> [N, C], the mean of each channel.
Variable global_average_pool(const Variable& x);

struct PoolKernels {
  static constexpr const char* op = "pool";
  static constexpr bool cpu_bfloat16 = true;
  OpState (*forward)(const PoolGeometry& geometry, const Tensor& x, Tensor& y);
  void (*backward)(const PoolGeometry& geometry, const OpState& state, const Tensor& x, const Tensor& y,
                   const Tensor& dy, Tensor& dx);
};

struct GlobalAveragePoolKernels {
  static constexpr const char* op = "global_average_pool";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, Tensor& y);
  void (*backward)(const Tensor& dy, Tensor& dx);  // dx = dy / (H W), everywhere
};

}  // namespace topknot
