#pragma once
// How many entries a density asks for: for the CPU and for kernels.

#include <cmath>
#include <cstddef>

#include "nn/base/host_device.h"

namespace topknot {

// k = max(1, floor(density * d)), computed in double, at most d; d where density >= 1. density > 0.
TOPKNOT_HOST_DEVICE std::size_t density_count(double density, std::size_t d) {
  if (density >= 1) return d;
  const double k = ::floor(density * static_cast<double>(d));
  const std::size_t count = k > 1 ? static_cast<std::size_t>(k) : 1;
  return count < d ? count : d;
}

}  // namespace topknot
