// Gradients in the types of include/topknot.h, by the threads of the caller.
#include <bit>
#include <cstdint>
#include <functional>

#include "compress/library/handle.h"
#include "compress/parallel.h"
#include "nn/core/bfloat16.h"

namespace topknot {
namespace {

float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16, rest = half & 0x7FFFu;
  if (rest >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | (rest & 0x3FF) << 13);  // infinity, NaN
  if (rest >= 0x400) return std::bit_cast<float>(sign | ((rest << 13) + (112u << 23)));
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -small : small;
}

// To nearest, ties to even.
std::uint16_t float_to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<std::uint16_t>(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return static_cast<std::uint16_t>(sign | 0x7C00);  // from 65520 on
  if (magnitude < 0x38800000) {  // below 2^-14: multiples of 2^-24, which adding 0.5 leaves in the last bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000));
  }
  const std::uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1);
  return static_cast<std::uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

template <class From, class To, class Convert>
void convert(const From* from, To* to, std::size_t n, const Convert& one) {
  for_parts(n, part_count(n), [&](std::size_t, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) to[i] = one(from[i]);
  });
}

}  // namespace

void read_values(const void* from, topknot_type type, float scale, std::span<float> to) {
  const std::size_t n = to.size();
  switch (type) {
    case TOPKNOT_FLOAT32:
      if (scale == 1) return convert(static_cast<const float*>(from), to.data(), n, std::identity());
      return convert(static_cast<const float*>(from), to.data(), n, [=](float x) { return x * scale; });
    case TOPKNOT_BFLOAT16:
      return convert(static_cast<const BFloat16*>(from), to.data(), n,
                     [=](BFloat16 x) { return to_float(x) * scale; });
    default:  // TOPKNOT_FLOAT16
      return convert(static_cast<const std::uint16_t*>(from), to.data(), n,
                     [=](std::uint16_t x) { return half_to_float(x) * scale; });
  }
}

void write_values(std::span<const float> from, float scale, topknot_type type, void* to) {
  const std::size_t n = from.size();
  switch (type) {
    case TOPKNOT_FLOAT32:
      if (scale == 1) return convert(from.data(), static_cast<float*>(to), n, std::identity());
      return convert(from.data(), static_cast<float*>(to), n, [=](float x) { return x * scale; });
    case TOPKNOT_BFLOAT16:
      return convert(from.data(), static_cast<BFloat16*>(to), n,
                     [=](float x) { return to_bfloat16(x * scale); });
    default:  // TOPKNOT_FLOAT16
      return convert(from.data(), static_cast<std::uint16_t*>(to), n,
                     [=](float x) { return float_to_half(x * scale); });
  }
}
}  // namespace topknot
