#pragma once
// bfloat16: the upper half of a float. 8 bits of precision, the range of float.

#include <bit>
#include <cstddef>
#include <cstdint>

namespace topknot {

struct BFloat16 {
  std::uint16_t bits = 0;
};

inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(std::uint32_t{value.bits} << 16);
}

// To nearest, ties to even; infinities stay, what is too large becomes one, a NaN stays a NaN.
inline BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  const std::uint32_t rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  return {static_cast<std::uint16_t>((magnitude > 0x7F800000 ? bits | 0x400000 : rounded) >> 16)};
}

// Convert n elements; `to` and `from` do not overlap.
void to_bfloat16(const float* from, std::size_t n, BFloat16* to);
void to_float(const BFloat16* from, std::size_t n, float* to);
// sum[i] = bfloat16(a[i] + b[i]), added as floats; sum may be a or b.
void add(const BFloat16* a, const BFloat16* b, std::size_t n, BFloat16* sum);

}  // namespace topknot
