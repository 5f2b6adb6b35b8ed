#include "nn/core/simd.h"

namespace topknot {
namespace {

TOPKNOT_MULTIVERSION void narrow(const float* from, std::size_t n, BFloat16* to) {
  for (std::size_t i = 0; i < n; ++i) to[i] = to_bfloat16(from[i]);
}

TOPKNOT_MULTIVERSION void widen(const BFloat16* from, std::size_t n, float* to) {
  for (std::size_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

TOPKNOT_MULTIVERSION void add_up(const BFloat16* a, const BFloat16* b, std::size_t n, BFloat16* sum) {
  for (std::size_t i = 0; i < n; ++i) sum[i] = to_bfloat16(to_float(a[i]) + to_float(b[i]));
}

}  // namespace

void to_bfloat16(const float* from, std::size_t n, BFloat16* to) {
  narrow(from, n, to);
}

void to_float(const BFloat16* from, std::size_t n, float* to) {
  widen(from, n, to);
}

void add(const BFloat16* a, const BFloat16* b, std::size_t n, BFloat16* sum) {
  add_up(a, b, n, sum);
}

TOPKNOT_MULTIVERSION void multiply(float* x, std::size_t n, float factor) {
  for (std::size_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace topknot
