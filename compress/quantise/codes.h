#pragma once
// Small codes to bytes and back (compress/quantise/block.h has the layout). `out` of the packers begins with
// the byte of the first code. The unpackers take any range of entries and give what a scale is multiplied
// with.

#include <cstddef>
#include <cstdint>
#include <span>

namespace topknot::quantise {

inline constexpr std::size_t kTrits = 5;  // a byte; 3^5 = 243

void pack_bits(const std::int16_t* codes, std::size_t count, std::byte* out);
void pack_levels(const std::int16_t* codes, std::size_t count, int bits, std::byte* out);
void pack_trits(const std::int16_t* codes, std::size_t count, std::byte* out);

void unpack_bits(std::span<const std::byte> in, std::size_t begin, std::size_t end, float* out);
void unpack_levels(std::span<const std::byte> in, std::size_t begin, std::size_t end, int bits,
                   std::uint32_t levels, float* out);
void unpack_trits(std::span<const std::byte> in, std::size_t begin, std::size_t end, float* out);

// x *= scale; a product of zero and anything is +0.
void scale_values(float* x, std::size_t count, float scale);

bool tail_is_zero(std::span<const std::byte> in, std::size_t bits);  // what is behind the first `bits`
bool levels_in_range(std::span<const std::byte> in, std::size_t begin, std::size_t end, int bits,
                     std::uint32_t levels);
bool trits_in_range(std::span<const std::byte> in, std::size_t count);  // digits behind the last entry too

}  // namespace topknot::quantise
