#pragma once
// Pooling over square windows and over whole images.

#include <memory>

#include "nn/core/autograd.h"

namespace topknot {

enum class PoolKind {
  max,      // the gradient goes to the window's first maximum; oneDNN passes over a NaN in the window
  average,  // of the elements inside the image: padding is not counted
};

struct PoolGeometry {
  PoolKind kind = PoolKind::max;
  std::int64_t window = 2, stride = 2, padding = 0;
  std::int64_t output_size(std::int64_t size) const { return (size + 2 * padding - window) / stride + 1; }
};

// A layer's prepared kernels, made once for each input shape.
class PoolKernels;
std::shared_ptr<PoolKernels> make_pool_kernels(const PoolGeometry& geometry);

Variable pool(const Variable& x, const std::shared_ptr<PoolKernels>& kernels);

// [N, C, H, W] -> [N, C], the mean of each channel.
Variable global_average_pool(const Variable& x);

}  // namespace topknot
