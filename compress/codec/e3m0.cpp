// Streaming DiLoCo's value codec (Douillard et al., arXiv 2501.18512): 4 bits per value, a sign and three bits of
// exponent. The values of a message are 0 and +-a 2^(c - 7) for c = 1 to 7, a the largest magnitude; nearest, ties to the
// even c. (The paper states no scale; formats of this name have magnitudes 1/4 to 16, which are these for a = 16.)
//
// A message whose a is below 2^-119 is sent as zeros. On the wire: a as a float, then the codes, c and the sign above it,
// two a byte from the lower bits on.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "compress/codec/codec.h"

namespace topknot {
namespace {

constexpr float kLeastLargest = 0x1p-119f;
constexpr unsigned kLargestCode = 7, kSign = 8;

float largest_of(std::span<const float> values) {
  float largest = 0;
  for (const float value : values) largest = std::fabs(value) > largest ? std::fabs(value) : largest;
  return largest < kLeastLargest ? 0 : largest;
}

unsigned code_of(float value, double largest) {
  // Between the magnitudes of codes c and c + 1, of a = 16; all products are exact.
  constexpr double kMiddles[] = {0.125, 0.375, 0.75, 1.5, 3, 6, 12};
  const double magnitude = 16 * std::fabs(static_cast<double>(value));
  unsigned code = 0;
  for (const double middle : kMiddles) {
    const bool even = (code + 1) % 2 == 0;
    if (even ? magnitude < middle * largest : magnitude <= middle * largest) break;
    ++code;
  }
  return code > 0 && value < 0 ? code | kSign : code;
}

float value_of(unsigned code, float largest) {
  const unsigned c = code & kLargestCode;
  const float magnitude =
      c == 0 ? 0 : std::ldexp(largest, static_cast<int>(c) - static_cast<int>(kLargestCode));
  return code & kSign ? -magnitude : magnitude;
}

std::size_t bytes(std::size_t count) {
  return count == 0 ? 0 : sizeof(float) + (count + 1) / 2;
}

void encode(std::span<const float> values, std::vector<std::byte>& out) {
  if (values.empty()) return;
  const float largest = largest_of(values);
  const std::size_t head = out.size();
  out.resize(head + bytes(values.size()));
  std::memcpy(out.data() + head, &largest, sizeof largest);
  if (largest == 0) return;
  for (std::size_t i = 0; i < values.size(); ++i)
    out[head + sizeof largest + i / 2] |=
        static_cast<std::byte>(code_of(values[i], static_cast<double>(largest)) << (i % 2 * 4));
}

void decode(std::span<const std::byte> in, std::span<float> out) {
  if (out.empty()) return;
  float largest = 0;
  std::memcpy(&largest, in.data(), sizeof largest);
  const bool zero = std::bit_cast<std::uint32_t>(largest) == 0;
  if (!zero && !(largest >= kLeastLargest && std::isfinite(largest))) damaged_block("an e3m0 scale");
  const std::span<const std::byte> codes = in.subspan(sizeof largest);
  unsigned most = 0;
  for (std::size_t i = 0; i < codes.size() * 2; ++i) {
    const unsigned code = std::to_integer<unsigned>(codes[i / 2]) >> (i % 2 * 4) & (kSign | kLargestCode);
    if (code == kSign || (i >= out.size() && code != 0)) damaged_block("an e3m0 code");
    if (i >= out.size()) continue;
    most = std::max(most, code & kLargestCode);
    out[i] = value_of(code, largest);
  }
  if (most != (zero ? 0 : kLargestCode)) damaged_block("e3m0 values that do not belong to their scale");
}

const bool e3m0_registered =
    value_codecs().add("e3m0", "4 bits per value: powers of two down to 1/64 of the largest, and 0",
                       {.id = 6, .bytes = bytes, .encode = encode, .decode = decode});

}  // namespace
}  // namespace topknot
