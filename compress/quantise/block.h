#pragma once
// Quantised blocks: every entry of a group as a small code, times the scale of the cell it lies in. Cells are
// consecutive ranges: a selection range (sign, ternary) or a bucket of one (levels). Kernels include this.
//
// Little-endian:
//   0  u32 magic 0x51544B54 ("TKTQ")
//   4  u8  version, 1
//   5  u8  flags: bit 0 = every entry of the sender's vector was finite; the other bits are 0
//   6  u8  kind: 1 sign, 2 levels, 3 ternary
//   7  u8  0
//   8  u32 numel: the group's length
//  12  u32 cells
//  16  u32 levels s of kind 2, else 1
//  20  f32 scales, one per cell: finite, not below +0
//      codes of all entries in order, the last byte filled with zeros
// Without the flag the block ends after the header. Codes, least significant bit first:
//   sign     1 bit: 0 is +scale, 1 is -scale
//   levels   level 0 .. s in the fewest bits, then 1 bit of sign, which level 0 must not have:
//            +-scale * (level / s)
//   ternary  five entries a byte, the first the lowest digit of base 3, 0 is 0, 1 is +scale, 2 is -scale;
//            bytes up to 242

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "nn/base/host_device.h"

namespace topknot::quantise {

// Signs' magnitudes are summed by chunks of so many entries: kChunk of compress/parallel.h, for kernels.
inline constexpr std::uint32_t kSumChunk = 16384;
// Over so many lanes, which are added in order: entry i of a chunk is lane i % kSignLanes's. Squares of a cell, which
// may be short, over kLevelLanes.
inline constexpr int kSignLanes = 32, kLevelLanes = 8;

enum class Kind : std::uint8_t { sign = 1, levels = 2, ternary = 3 };

// The first bytes of a block.
struct BlockHeader {
  static constexpr std::uint32_t kMagic = 0x51544B54;
  static constexpr std::uint8_t kVersion = 1, kFiniteFlag = 1;
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion, flags = 0, kind = 0, zero = 0;
  std::uint32_t numel = 0, cells = 0, levels = 0;
};

// QSGD's level of an entry: levels |x| / norm (> 0), rounded up if `uniform` is below the fraction.
TOPKNOT_HOST_DEVICE int level_of(float magnitude, float uniform, float norm, float levels) {
  const float share = magnitude / norm;
  const float exact = (share < 1.0f ? share : 1.0f) * levels;
  const int low = static_cast<int>(exact);
  return low + (uniform < exact - static_cast<float>(low) ? 1 : 0);
}

inline constexpr std::size_t kHeaderBytes = sizeof(BlockHeader);

// The format, the same on all ranks.
struct Format {
  Kind kind = Kind::sign;
  std::uint32_t levels = 1;          // of Kind::levels: 1 to 32767
  std::size_t numel = 0;             // below 2^31
  std::vector<std::uint32_t> cells;  // where each ends: ascending, the last at numel; none if numel is 0

  int bits() const;  // of a code; of Kind::ternary, whose codes share bytes: 0
  std::size_t code_bytes() const;
  std::size_t bytes() const { return kHeaderBytes + cells.size() * sizeof(float) + code_bytes(); }
};

// An empty block of the right length with its header, for write_codes(); header only if not finite.
std::vector<std::byte> start_block(const Format& format, bool finite);
void write_scales(const Format& format, std::span<const float> scales, std::span<std::byte> block);

// Codes as integers: sign 0 or 1; levels -s .. s; ternary -1, 0, 1. Entries [begin, end) of the group, where
// begin and end (or numel) are multiples of code_step(), so that ranges share no bytes.
std::size_t code_step(const Format& format);
void write_codes(const Format& format, std::span<const std::int16_t> codes, std::size_t begin,
                 std::size_t end, std::span<std::byte> block);

// Whether the sender's vector was finite. Throws Error for all but an undamaged block of this format.
bool check_block(const Format& format, std::span<const std::byte> block);
// The largest scale, which no value exceeds; of a checked, finite block.
float largest_scale(const Format& format, std::span<const std::byte> block);
// values[i - begin] = what entry i stands for; of a checked, finite block. `cell` is the one that holds entry
// `begin`, and then the one that holds `end`, for calls that go on from there.
void read_values(const Format& format, std::span<const std::byte> block, std::size_t begin, std::size_t end,
                 std::size_t& cell, float* values);
std::size_t cell_of(const Format& format, std::size_t entry);

// check_block() and read_values() of all entries. `out` has numel entries, left alone if the result is false.
bool read_block(const Format& format, std::span<const std::byte> block, std::span<float> out);

}  // namespace topknot::quantise
