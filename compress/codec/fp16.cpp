// IEEE half precision times a power of two, one per message, so that nothing overflows and what is small against
// the largest keeps its precision. One byte: i8 e; then the halves h: value = h * 2^e.
//
// e = floor(log2 m) - 14 with m the largest magnitude, rounded to a half's 11 bits: m lies in [2^14, 2^15),
// magnitudes down to 2^-28 m have 11 bits. e is at least -125, where the smallest half is the smallest float;
// at most 113, where the halves end at 0x77FF, the last one that is finite as a float.
#include <fmt/format.h>

#include <bit>
#include <cstring>

#include "compress/codec/code_bits.h"
#include "compress/codec/codec.h"
#include "compress/select/passes/keys.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

TOPKNOT_MULTIVERSION std::int32_t largest_key(const float* values, std::size_t n) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t key = std::bit_cast<std::int32_t>(values[i]) & 0x7FFFFFFF;
    largest = key > largest ? key : largest;
  }
  return largest;
}

TOPKNOT_MULTIVERSION void to_fp16(const float* values, std::size_t n, float scale, std::byte* out) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint16_t half = fp16::encode(values[i], scale);
    std::memcpy(out + 2 * i, &half, sizeof half);
  }
}

// Returns the largest half without its sign; from 0x7C00 on they are not numbers.
TOPKNOT_MULTIVERSION std::uint32_t from_fp16(const std::byte* in, std::size_t n, float scale, float* values) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, in + 2 * i, sizeof half);
    values[i] = fp16::decode(half, scale);
    const std::uint32_t magnitude = half & 0x7FFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

class Fp16ValueCode final : public ValueCodec {
 public:
  std::uint8_t id() const override { return 2; }
  bool exact() const override { return false; }
  std::size_t bytes(std::size_t count) const override { return count == 0 ? 0 : 1 + 2 * count; }
  void encode(std::span<const float> values, std::vector<std::byte>& out) const override {
    if (values.empty()) return;
    const std::size_t head = out.size();
    out.resize(head + bytes(values.size()));
    const int e = fp16::exponent_of(largest_key(values.data(), values.size()));
    out[head] = static_cast<std::byte>(e);
    to_fp16(values.data(), values.size(), fp16::power_of_two(-e), out.data() + head + 1);
  }
  void decode(std::span<const std::byte> in, std::span<float> out) const override {
    if (out.empty()) return;
    const int e = std::to_integer<std::int8_t>(in[0]);
    if (e < fp16::kLeast || e > fp16::kMost) damaged_block(fmt::format("fp16 exponent {}", e));
    const std::uint32_t largest = from_fp16(in.data() + 1, out.size(), fp16::power_of_two(e), out.data());
    if (largest > fp16::kLargestHalf || (e > fp16::kLeast && largest < fp16::kLargestBinade))
      damaged_block("an fp16 value that does not belong to its exponent");
  }
};

const bool fp16_registered = [] {
  value_codecs().add("fp16", "2 bytes per value, 11 bits of precision, scaled by message",
                     [](const CompressOptions&) -> std::unique_ptr<ValueCodec> {
                       return std::make_unique<Fp16ValueCode>();
                     });
  return true;
}();

}  // namespace
}  // namespace topknot
