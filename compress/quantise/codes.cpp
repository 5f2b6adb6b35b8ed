#include "compress/quantise/codes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "nn/core/simd.h"

namespace topknot::quantise {
namespace {

// The digits of every byte, as factors; bytes above 242 do not occur in a checked block.
constexpr std::array<std::array<float, kTrits>, 243> make_trits() {
  std::array<std::array<float, kTrits>, 243> table{};
  for (std::size_t byte = 0; byte < 243; ++byte)
    for (std::size_t i = 0, rest = byte; i < kTrits; ++i, rest /= 3)
      table[byte][i] = rest % 3 == 0 ? 0.0f : rest % 3 == 1 ? 1.0f : -1.0f;
  return table;
}
constexpr auto kTritTable = make_trits();

constexpr std::array<std::array<float, 8>, 256> make_signs() {
  std::array<std::array<float, 8>, 256> table{};
  for (std::size_t byte = 0; byte < 256; ++byte)
    for (std::size_t i = 0; i < 8; ++i) table[byte][i] = (byte >> i) & 1 ? -1.0f : 1.0f;
  return table;
}
constexpr auto kSignTable = make_signs();

// Reads codes of `bits` bits, at most 16, from entry `first` on.
class BitReader {
 public:
  BitReader(std::span<const std::byte> in, std::size_t first, int bits)
      : in_(in), at_(first * static_cast<std::size_t>(bits)), bits_(bits) {}
  std::uint32_t next() {
    // Up to three bytes hold a code; those behind the end count as zeros.
    std::uint32_t word = 0;
    const std::size_t byte = at_ / 8;
    if (byte + sizeof word <= in_.size())
      std::memcpy(&word, in_.data() + byte, sizeof word);
    else
      std::memcpy(&word, in_.data() + byte, in_.size() - byte);
    word >>= at_ % 8;
    at_ += static_cast<std::size_t>(bits_);
    return word & ((1u << bits_) - 1);
  }

 private:
  std::span<const std::byte> in_;
  std::size_t at_;
  int bits_;
};

TOPKNOT_MULTIVERSION bool bytes_in_range(const std::uint8_t* in, std::size_t count, std::uint32_t levels) {
  std::uint8_t bad = 0;
  for (std::size_t i = 0; i < count; ++i) bad |= (in[i] & 127) > levels || in[i] == 128;
  return bad == 0;
}

TOPKNOT_MULTIVERSION void pack_bytes(const std::int16_t* codes, std::size_t count, std::uint8_t* out) {
  for (std::size_t i = 0; i < count; ++i)
    out[i] = static_cast<std::uint8_t>(codes[i] < 0 ? -codes[i] | 128 : codes[i]);
}

TOPKNOT_MULTIVERSION void unpack_bytes(const std::uint8_t* in, std::size_t count, float levels, float* out) {
  for (std::size_t i = 0; i < count; ++i) {
    const float size = static_cast<float>(in[i] & 127) / levels;
    out[i] = in[i] & 128 ? -size : size;
  }
}

}  // namespace

TOPKNOT_MULTIVERSION void pack_bits(const std::int16_t* codes, std::size_t count, std::byte* out) {
  const std::size_t whole = count / 8;
  for (std::size_t byte = 0; byte < whole; ++byte) {
    unsigned value = 0;
    for (unsigned i = 0; i < 8; ++i) value |= static_cast<unsigned>(codes[byte * 8 + i]) << i;
    out[byte] = static_cast<std::byte>(value);
  }
  unsigned value = 0;
  for (std::size_t i = whole * 8; i < count; ++i) value |= static_cast<unsigned>(codes[i]) << (i % 8);
  if (count % 8) out[whole] = static_cast<std::byte>(value);
}

void pack_levels(const std::int16_t* codes, std::size_t count, int bits, std::byte* out) {
  if (bits == 8) return pack_bytes(codes, count, reinterpret_cast<std::uint8_t*>(out));
  std::uint64_t waiting = 0;
  int have = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const int code = codes[i];
    const auto word = static_cast<std::uint64_t>(code < 0 ? -code | (1 << (bits - 1)) : code);
    waiting |= word << have;
    have += bits;
    for (; have >= 8; have -= 8, waiting >>= 8) *out++ = static_cast<std::byte>(waiting & 255);
  }
  if (have > 0) *out = static_cast<std::byte>(waiting & 255);
}

void pack_trits(const std::int16_t* codes, std::size_t count, std::byte* out) {
  constexpr unsigned power[kTrits] = {1, 3, 9, 27, 81};
  for (std::size_t first = 0; first < count; first += kTrits) {
    unsigned byte = 0;
    for (std::size_t i = first; i < std::min(first + kTrits, count); ++i)
      byte += power[i - first] * (codes[i] < 0 ? 2u : static_cast<unsigned>(codes[i]));
    *out++ = static_cast<std::byte>(byte);
  }
}

void unpack_bits(std::span<const std::byte> in, std::size_t begin, std::size_t end, float* out) {
  const auto one = [&](std::size_t i) {
    return (static_cast<unsigned>(in[i / 8]) >> (i % 8)) & 1u ? -1.0f : 1.0f;
  };
  std::size_t i = begin;
  for (; i < end && i % 8 != 0; ++i) *out++ = one(i);
  for (; i + 8 <= end; i += 8, out += 8)
    std::memcpy(out, kSignTable[static_cast<std::size_t>(in[i / 8])].data(), 8 * sizeof(float));
  for (; i < end; ++i) *out++ = one(i);
}

void unpack_levels(std::span<const std::byte> in, std::size_t begin, std::size_t end, int bits,
                   std::uint32_t levels, float* out) {
  const float whole = static_cast<float>(levels);
  if (bits == 8)
    return unpack_bytes(reinterpret_cast<const std::uint8_t*>(in.data()) + begin, end - begin, whole, out);
  BitReader reader(in, begin, bits);
  const std::uint32_t sign = 1u << (bits - 1);
  for (std::size_t i = begin; i < end; ++i) {
    const std::uint32_t code = reader.next();
    const float size = static_cast<float>(code & (sign - 1)) / whole;
    out[i - begin] = code & sign ? -size : size;
  }
}

void unpack_trits(std::span<const std::byte> in, std::size_t begin, std::size_t end, float* out) {
  std::size_t i = begin;
  for (; i < end && i % kTrits != 0; ++i)
    *out++ = kTritTable[static_cast<std::size_t>(in[i / kTrits])][i % kTrits];
  for (; i + kTrits <= end; i += kTrits, out += kTrits)
    std::memcpy(out, kTritTable[static_cast<std::size_t>(in[i / kTrits])].data(), kTrits * sizeof(float));
  for (; i < end; ++i) *out++ = kTritTable[static_cast<std::size_t>(in[i / kTrits])][i % kTrits];
}

TOPKNOT_MULTIVERSION void scale_values(float* x, std::size_t count, float scale) {
  for (std::size_t i = 0; i < count; ++i) x[i] = x[i] * scale + 0.0f;
}

bool tail_is_zero(std::span<const std::byte> in, std::size_t bits) {
  return bits % 8 == 0 || static_cast<unsigned>(in[bits / 8]) >> (bits % 8) == 0;
}

bool levels_in_range(std::span<const std::byte> in, std::size_t begin, std::size_t end, int bits,
                     std::uint32_t levels) {
  if (bits == 8)
    return bytes_in_range(reinterpret_cast<const std::uint8_t*>(in.data()) + begin, end - begin, levels);
  BitReader reader(in, begin, bits);
  const std::uint32_t sign = 1u << (bits - 1);
  bool good = true;
  for (std::size_t i = begin; i < end; ++i) {
    const std::uint32_t code = reader.next();
    good &= (code & (sign - 1)) <= levels && code != sign;
  }
  return good;
}

bool trits_in_range(std::span<const std::byte> in, std::size_t count) {
  std::uint8_t largest = 0;
  for (const std::byte byte : in) largest = std::max(largest, static_cast<std::uint8_t>(byte));
  if (largest > 242) return false;
  if (count % kTrits == 0) return true;
  const auto& digits = kTritTable[static_cast<std::size_t>(in[count / kTrits])];
  return std::all_of(digits.begin() + static_cast<std::ptrdiff_t>(count % kTrits), digits.end(),
                     [](float digit) { return digit == 0.0f; });
}

}  // namespace topknot::quantise
