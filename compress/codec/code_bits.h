#pragma once
// A block's header, and the formulas of Rice's parameter (rice.cpp) and of the value codecs bf16, fp16, int8
// and fp8 (values.cpp), a number at a time, for CPUs and kernels: the same bits on both.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "nn/base/host_device.h"

namespace topknot {

struct BlockHeader {
  static constexpr std::uint32_t kMagic = 0x544B4E54;
  static constexpr std::uint8_t kVersion = 1, kFiniteFlag = 1;

  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion, flags = 0, index_codec = 0, value_codec = 0;
  std::uint32_t numel = 0, count = 0;
};
static_assert(sizeof(BlockHeader) == 16);

TOPKNOT_HOST_DEVICE std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
TOPKNOT_HOST_DEVICE float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Entries of a part of the layout rice: its u32 costs 0.03 bits per entry, within 1 % of the bare code.
inline constexpr std::uint32_t kRicePart = 1024;

// The b with 2^(b - 1/2) <= 0.693 numel / count < 2^(b + 1/2), 0 to 30.
TOPKNOT_HOST_DEVICE unsigned rice_parameter(std::size_t count, std::size_t numel) {
  const double ratio = 0.693 * static_cast<double>(numel);
  double bound = static_cast<double>(count) * 1.4142135623730951;  // 2^(1 - 1/2) counts
  unsigned b = 0;
  for (; b < 30 && bound <= ratio; ++b) bound *= 2;
  return b;
}

namespace bf16 {

constexpr std::uint32_t kLargest = 0x7F7F;

TOPKNOT_HOST_DEVICE std::uint16_t encode(float value) {
  const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF, sign = (bits >> 16) & 0x8000;
  const std::uint32_t rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16;
  return static_cast<std::uint16_t>(sign | (rounded < kLargest ? rounded : kLargest));
}
TOPKNOT_HOST_DEVICE float decode(std::uint16_t half) {
  return float_of(std::uint32_t{half} << 16);
}

}  // namespace bf16

namespace fp16 {

constexpr int kLeast = -125, kMost = 113;         // of the exponent
constexpr std::uint32_t kLargestHalf = 0x77FF;    // (2 - 2^-10) 2^14
constexpr std::uint32_t kLargestBinade = 0x7400;  // 2^14

TOPKNOT_HOST_DEVICE float power_of_two(int e) {
  return float_of(static_cast<std::uint32_t>(e + 127) << 23);
}
// `largest_key`: the bits of the largest magnitude.
TOPKNOT_HOST_DEVICE int exponent_of(std::int32_t largest_key) {
  const std::int32_t rounded = largest_key + 0xFFF + ((largest_key >> 13) & 1);
  const int e = (rounded >> 23) - 127 - 14;
  return e < kLeast ? kLeast : e > kMost ? kMost : e;
}
// `scale`: 2^-e.
TOPKNOT_HOST_DEVICE std::uint16_t encode(float value, float scale) {
  const std::uint32_t bits = bits_of(value * scale);
  const std::uint32_t magnitude = bits & 0x7FFFFFFF, sign = (bits >> 16) & 0x8000;
  const std::uint32_t normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
  // 0.5 has ulp 2^-24, the smallest half: the addition rounds to it.
  const std::uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const std::uint32_t rounded = magnitude < (113u << 23) ? small : normal;
  return static_cast<std::uint16_t>(sign | (rounded < kLargestHalf ? rounded : kLargestHalf));
}
// `scale`: 2^e.
TOPKNOT_HOST_DEVICE float decode(std::uint16_t half, float scale) {
  const std::uint32_t magnitude = half & 0x7FFFu, sign = (half & 0x8000u) << 16;
  const float normal = float_of((magnitude << 13) + (112u << 23));
  const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
  return float_of(bits_of((magnitude < 0x400 ? small : normal) * scale) | sign);
}

}  // namespace fp16

namespace int8 {

constexpr std::size_t kBlock = 256;  // values that share a scale
constexpr float kLeastScale = 0x1p-119f;
// The reciprocals in decode() give the bits of a division for every code and scale: a quotient in double is either
// 2^-33 of itself away from the middle of two floats, or exact, and then the product is exact too.
constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the nearest integer,
                                               // ties to even

// The scale of a block with this largest magnitude.
TOPKNOT_HOST_DEVICE float scale_of(float largest) {
  return largest < kLeastScale ? 0.0f : largest;
}
TOPKNOT_HOST_DEVICE double factor_of(float scale) {
  return scale > 0 ? 127.0 / static_cast<double>(scale) : 0.0;
}
TOPKNOT_HOST_DEVICE std::int8_t encode(float value, double factor) {
  return static_cast<std::int8_t>(
      static_cast<std::int32_t>(static_cast<double>(value) * factor + kRound - kRound));
}
TOPKNOT_HOST_DEVICE float decode(std::int8_t code, double scale) {
  return static_cast<float>(static_cast<double>(std::int32_t{code}) * scale * (1.0 / 127.0));
}

}  // namespace int8

// 4 bits of exponent and 3 of mantissa (OCP's E4M3): the magnitudes 0, 2^-9 to 448; 0x7F is no number.
namespace fp8 {

constexpr float kLeastScale = 0x1p-107f;

TOPKNOT_HOST_DEVICE double factor_of(float scale) {
  return scale > 0 ? 448.0 / static_cast<double>(scale) : 0.0;
}
// To nearest, ties to the even code. What rounds to 0 is +0.
TOPKNOT_HOST_DEVICE std::uint8_t encode(float value, double factor) {
  const std::uint32_t bits = bits_of(static_cast<float>(static_cast<double>(value) * factor));
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  const std::uint32_t normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
  // 2^14 has ulp 2^-9, the smallest magnitude: the addition rounds to it.
  const std::uint32_t small = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const std::uint32_t code = magnitude < (121u << 23) ? small : normal;
  return static_cast<std::uint8_t>(code | (code > 0 ? (bits >> 24) & 0x80 : 0));
}
TOPKNOT_HOST_DEVICE float decode(std::uint8_t code, double scale) {
  const std::uint32_t magnitude = code & 0x7Fu;
  const float normal = float_of((magnitude << 20) + (120u << 23));
  const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f;
  const auto value =
      static_cast<float>(static_cast<double>(magnitude < 8 ? small : normal) * scale * (1.0 / 448.0));
  return code & 0x80 ? -value : value;
}

}  // namespace fp8

}  // namespace topknot
