#include "nn/core/bfloat16.h"

#include "nn/core/simd.h"

namespace topknot {
namespace {

TOPKNOT_MULTIVERSION void narrow(const float* from, std::size_t n, BFloat16* to) {
  for (std::size_t i = 0; i < n; ++i) to[i] = to_bfloat16(from[i]);
}

TOPKNOT_MULTIVERSION void widen(const BFloat16* from, std::size_t n, float* to) {
  for (std::size_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

TOPKNOT_MULTIVERSION void accumulate(const BFloat16* addend, std::size_t n, BFloat16* sum) {
  for (std::size_t i = 0; i < n; ++i) sum[i] = to_bfloat16(to_float(sum[i]) + to_float(addend[i]));
}

}  // namespace

void to_bfloat16(const float* from, std::size_t n, BFloat16* to) {
  narrow(from, n, to);
}

void to_float(const BFloat16* from, std::size_t n, float* to) {
  widen(from, n, to);
}

void add(const BFloat16* addend, std::size_t n, BFloat16* sum) {
  accumulate(addend, n, sum);
}

}  // namespace topknot
