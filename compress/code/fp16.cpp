// IEEE half precision times a power of two, one a message, so that nothing overflows and what is small against
// the largest keeps its precision. One byte: i8 e; then the halves h: value = h * 2^e.
//
// e = floor(log2 m) - 14 with m the largest magnitude, rounded to a half's 11 bits: m lies in [2^14, 2^15),
// magnitudes down to 2^-28 m have 11 bits. e is at least -125, where the smallest half is the smallest float;
// at most 113, where the halves end at 0x77FF, the last one that is finite as a float.
#include <algorithm>
#include <bit>
#include <cstring>

#include "compress/code/code.h"
#include "compress/select/keys.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

constexpr int kLeast = -125, kMost = 113;
constexpr std::uint32_t kLargestHalf = 0x77FF;    // (2 - 2^-10) 2^14
constexpr std::uint32_t kLargestBinade = 0x7400;  // 2^14

float power_of_two(int e) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(e + 127) << 23);
}

TOPKNOT_MULTIVERSION std::int32_t largest_key(const float* values, std::size_t n) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t key = std::bit_cast<std::int32_t>(values[i]) & 0x7FFFFFFF;
    largest = key > largest ? key : largest;
  }
  return largest;
}

TOPKNOT_MULTIVERSION void to_fp16(const float* values, std::size_t n, float scale, std::byte* out) {
  const auto one_half = std::bit_cast<std::uint32_t>(0.5f);
  for (std::size_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i] * scale);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF, sign = (bits >> 16) & 0x8000;
    const std::uint32_t normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
    // 0.5 has ulp 2^-24, the smallest half: the addition rounds to it.
    const std::uint32_t small =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - one_half;
    const std::uint32_t rounded = magnitude < (113u << 23) ? small : normal;
    const auto half = static_cast<std::uint16_t>(sign | (rounded < kLargestHalf ? rounded : kLargestHalf));
    std::memcpy(out + 2 * i, &half, sizeof half);
  }
}

// Returns the largest half without its sign; from 0x7C00 on they are not numbers.
TOPKNOT_MULTIVERSION std::uint32_t from_fp16(const std::byte* in, std::size_t n, float scale, float* values) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, in + 2 * i, sizeof half);
    const std::uint32_t magnitude = half & 0x7FFFu, sign = (half & 0x8000u) << 16;
    const float normal = std::bit_cast<float>((magnitude << 13) + (112u << 23));
    const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f;
    const float value = (magnitude < 0x400 ? small : normal) * scale;
    values[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

int exponent_of(std::int32_t largest_key) {
  const std::int32_t rounded = largest_key + 0xFFF + ((largest_key >> 13) & 1);
  return std::clamp((rounded >> 23) - 127 - 14, kLeast, kMost);
}

class Fp16ValueCode final : public ValueCode {
 public:
  std::uint8_t id() const override { return 2; }
  bool exact() const override { return false; }
  std::size_t bytes(std::size_t count) const override { return count == 0 ? 0 : 1 + 2 * count; }
  void encode(std::span<const float> values, std::vector<std::byte>& out) const override {
    if (values.empty()) return;
    const std::size_t head = out.size();
    out.resize(head + bytes(values.size()));
    const int e = exponent_of(largest_key(values.data(), values.size()));
    out[head] = static_cast<std::byte>(e);
    to_fp16(values.data(), values.size(), power_of_two(-e), out.data() + head + 1);
  }
  void decode(std::span<const std::byte> in, std::span<float> out) const override {
    if (out.empty()) return;
    const int e = std::to_integer<std::int8_t>(in[0]);
    if (e < kLeast || e > kMost) damaged_block("fp16 exponent " + std::to_string(e));
    const std::uint32_t largest = from_fp16(in.data() + 1, out.size(), power_of_two(e), out.data());
    if (largest > kLargestHalf || (e > kLeast && largest < kLargestBinade))
      damaged_block("an fp16 value that does not belong to its exponent");
  }
};

const bool registered = [] {
  value_codes().add(
      "fp16", "2 bytes a value, 11 bits of precision, scaled by message",
      [](const CompressOptions&) -> std::unique_ptr<ValueCode> { return std::make_unique<Fp16ValueCode>(); });
  return true;
}();

}  // namespace
}  // namespace topknot
