#include "nn/core/simd.h"

namespace topknot {

TOPKNOT_MULTIVERSION void multiply(float* x, std::size_t n, float factor) {
  for (std::size_t i = 0; i < n; ++i) x[i] *= factor;
}

TOPKNOT_MULTIVERSION void multiply(double* x, std::size_t n, double factor) {
  for (std::size_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace topknot
