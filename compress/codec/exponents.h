#pragma once
// Floats with coded exponents: lossless, whatever their bits are. Neighbours' exponents lie close together:
// the idea of ZipCCL (arXiv 2604.27844), with codes of one width in each block, which suit vectors.
//
// Blocks of kExponentBlock values, the last one shorter, one after the other. A block, little-endian:
//   0  u8  first: the exponent of code 0; every code's is below 256
//   1  u8  width w of a code, 0 to 8; bit 7: zeros are left out
//   2  u16 how many of its exponents are escaped
//   4  if zeros are left out, a bit for each value, in each byte from the lowest up: it is not +0, and follows
// then of the `count` values that follow:
//   the lower 16 bits of each (none in bfloat16); a byte each of sign and upper 7 bits of the mantissa;
//   count / 16 times 16 codes of w bits, as w words of 16 bits. Code c is exponent first + c; all ones, of a w from 1
//   to 7, an escape. Of width 8 there are no escapes, of width 0 no codes;
//   the exponents of the last count % 16 values, a byte each; the escaped ones, a byte each.
// First, width and zeros are those that make the block the smallest, so it never takes more than 4 bytes above the
// values. The same bytes on every machine.

#include <cstddef>
#include <span>
#include <vector>

#include "nn/core/bfloat16.h"

namespace topknot {

inline constexpr std::size_t kExponentBlock = 4096;

// Replaces `out`.
void encode_exponents(std::span<const float> values, std::vector<std::byte>& out);
void encode_exponents(std::span<const BFloat16> values, std::vector<std::byte>& out);
// Throws Error, with `values` undefined, if `in` is not as long as its headers say for this many values.
void decode_exponents(std::span<const std::byte> in, std::span<float> values);
void decode_exponents(std::span<const std::byte> in, std::span<BFloat16> values);

}  // namespace topknot
