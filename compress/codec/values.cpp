// The value codecs.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "compress/codec/code_bits.h"
#include "compress/codec/codec.h"
#include "compress/select/passes/keys.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

// bfloat16: the upper half of a float, rounded to nearest, ties to even, never up to infinity.

TOPKNOT_MULTIVERSION void to_bf16(const float* values, std::size_t n, std::byte* out) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint16_t half = bf16::encode(values[i]);
    std::memcpy(out + 2 * i, &half, sizeof half);
  }
}

TOPKNOT_MULTIVERSION void from_bf16(const std::byte* in, std::size_t n, float* values) {
  for (std::size_t i = 0; i < n; ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, in + 2 * i, sizeof half);
    values[i] = bf16::decode(half);
  }
}

// IEEE half precision times a power of two, one per message, so that nothing overflows and what is small
// against the largest keeps its precision. One byte: i8 e; then the halves h: value = h * 2^e.
//
// e = floor(log2 m) - 14 with m the largest magnitude, rounded to a half's 11 bits: m lies in [2^14, 2^15),
// magnitudes down to 2^-28 m have 11 bits. e is at least -125, where the smallest half is the smallest float;
// at most 113, where the halves end at 0x77FF, the last one that is finite as a float.

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

std::size_t fp16_bytes(std::size_t count) {
  return count == 0 ? 0 : 1 + 2 * count;
}
void fp16_encode(std::span<const float> values, std::vector<std::byte>& out) {
  if (values.empty()) return;
  const std::size_t head = out.size();
  out.resize(head + fp16_bytes(values.size()));
  const int e = fp16::exponent_of(largest_key(values.data(), values.size()));
  out[head] = static_cast<std::byte>(e);
  to_fp16(values.data(), values.size(), fp16::power_of_two(-e), out.data() + head + 1);
}
void fp16_decode(std::span<const std::byte> in, std::span<float> out) {
  if (out.empty()) return;
  const int e = std::to_integer<std::int8_t>(in[0]);
  if (e < fp16::kLeast || e > fp16::kMost) damaged_block("fp16 exponent " + std::to_string(e));
  const std::uint32_t largest = from_fp16(in.data() + 1, out.size(), fp16::power_of_two(e), out.data());
  if (largest > fp16::kLargestHalf || (e > fp16::kLeast && largest < fp16::kLargestBinade))
    damaged_block("an fp16 value that does not belong to its exponent");
}

// 8 bits per value. Blocks of 256 values have one float32 scale each, their largest magnitude a; computed in double.
// First the scales, then the codes q.
//
//   int8   q = nearest integer to 127 x / a, value = q a / 127
//   fp8    q = nearest E4M3 number to 448 x / a, value = q a / 448
//
// A block whose a is below 2^-119, of fp8 2^-107, is sent as zeros: below the normal range q coincide.

TOPKNOT_MULTIVERSION void to_int8(const float* values, std::size_t n, double factor, std::byte* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(int8::encode(values[i], factor));
}
TOPKNOT_MULTIVERSION void to_fp8(const float* values, std::size_t n, double factor, std::byte* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(fp8::encode(values[i], factor));
}

// These return the largest code without its sign, 255 if one is none.
TOPKNOT_MULTIVERSION std::int32_t from_int8(const std::byte* in, std::size_t n, double scale, float* values) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto code = static_cast<std::int8_t>(in[i]);
    const std::int32_t q = code, magnitude = q < 0 ? -q : q;
    values[i] = int8::decode(code, scale);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}
TOPKNOT_MULTIVERSION std::int32_t from_fp8(const std::byte* in, std::size_t n, double scale, float* values) {
  std::int32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto code = static_cast<std::uint8_t>(in[i]);
    const std::int32_t magnitude = code == 0x80 ? 255 : code & 0x7F;  // -0 is no code
    values[i] = fp8::decode(code, scale);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

struct Int8 {
  static constexpr const char* kName = "int8";
  static constexpr float kLeastScale = int8::kLeastScale;
  static constexpr std::int32_t kLargest = 127;  // the code of a
  static constexpr auto factor_of = int8::factor_of;
  static constexpr auto to_codes = to_int8;
  static constexpr auto from_codes = from_int8;
};
struct Fp8 {
  static constexpr const char* kName = "fp8";
  static constexpr float kLeastScale = fp8::kLeastScale;
  static constexpr std::int32_t kLargest = 0x7E;
  static constexpr auto factor_of = fp8::factor_of;
  static constexpr auto to_codes = to_fp8;
  static constexpr auto from_codes = from_fp8;
};

std::size_t byte_bytes(std::size_t count) {
  return (count + int8::kBlock - 1) / int8::kBlock * sizeof(float) + count;
}
template <class Bits>
void byte_encode(std::span<const float> values, std::vector<std::byte>& out) {
  const std::size_t head = out.size();
  out.resize(head + byte_bytes(values.size()));
  std::byte* const scales = out.data() + head;
  std::byte* const codes = scales + byte_bytes(values.size()) - values.size();
  for (std::size_t begin = 0; begin < values.size(); begin += int8::kBlock) {
    const std::size_t n = std::min(int8::kBlock, values.size() - begin);
    const float largest = std::bit_cast<float>(largest_key(values.data() + begin, n));
    const float scale = largest < Bits::kLeastScale ? 0.0f : largest;
    std::memcpy(scales + begin / int8::kBlock * sizeof scale, &scale, sizeof scale);
    Bits::to_codes(values.data() + begin, n, Bits::factor_of(scale), codes + begin);
  }
}
template <class Bits>
void byte_decode(std::span<const std::byte> in, std::span<float> out) {
  const std::byte* const scales = in.data();
  const std::byte* const codes = scales + in.size() - out.size();
  for (std::size_t begin = 0; begin < out.size(); begin += int8::kBlock) {
    const std::size_t n = std::min(int8::kBlock, out.size() - begin);
    float scale = 0;
    std::memcpy(&scale, scales + begin / int8::kBlock * sizeof scale, sizeof scale);
    const bool zero = std::bit_cast<std::uint32_t>(scale) == 0;
    if (!zero && !(scale >= Bits::kLeastScale && std::isfinite(scale)))
      damaged_block(std::string("an ") + Bits::kName + " scale");
    const std::int32_t largest =
        Bits::from_codes(codes + begin, n, static_cast<double>(scale), out.data() + begin);
    if (largest != (zero ? 0 : Bits::kLargest))
      damaged_block(std::string(Bits::kName) + " values that do not belong to their scale");
  }
}

const bool values_registered[] = {
    value_codecs().add("fp32", "4 bytes per value, exact",
                       {.id = 0,
                        .exact = true,
                        .bytes = [](std::size_t count) { return count * sizeof(float); },
                        .encode =
                            [](std::span<const float> values, std::vector<std::byte>& out) {
                              const auto bytes = std::as_bytes(values);
                              out.insert(out.end(), bytes.begin(), bytes.end());
                            },
                        .decode =
                            [](std::span<const std::byte> in, std::span<float> out) {
                              if (!out.empty()) std::memcpy(out.data(), in.data(), in.size());
                            }}),
    value_codecs().add(
        "bf16", "2 bytes per value, 8 bits of precision",
        {.id = 1,
         .bytes = [](std::size_t count) { return 2 * count; },
         .encode =
             [](std::span<const float> values, std::vector<std::byte>& out) {
               const std::size_t head = out.size();
               out.resize(head + 2 * values.size());
               to_bf16(values.data(), values.size(), out.data() + head);
             },
         .decode = [](std::span<const std::byte> in,
                      std::span<float> out) { from_bf16(in.data(), out.size(), out.data()); }}),
    value_codecs().add("fp16", "2 bytes per value, 11 bits of precision, scaled by message",
                       {.id = 2, .bytes = fp16_bytes, .encode = fp16_encode, .decode = fp16_decode}),
    value_codecs().add(
        "int8", "1 byte per value, scaled by blocks of 256",
        {.id = 3, .bytes = byte_bytes, .encode = byte_encode<Int8>, .decode = byte_decode<Int8>}),
    value_codecs().add(
        "fp8", "1 byte per value with an exponent (E4M3), scaled by blocks of 256",
        {.id = 8, .bytes = byte_bytes, .encode = byte_encode<Fp8>, .decode = byte_decode<Fp8>})};

}  // namespace
}  // namespace topknot
