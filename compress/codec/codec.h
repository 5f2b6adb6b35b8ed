#pragma once
// Coding: selected entries as bytes on the wire. A block is a header, the positions in an index layout, the
// values in a value codec; a new one of either kind is one file that registers itself.
//
// The header, 16 bytes, little-endian:
//   0  u32 magic 0x544B4E54 ("TNKT")
//   4  u8  version, 1
//   5  u8  flags: bit 0 = every entry of the sender's accumulated gradient was finite; the other bits are 0
//   6  u8  index layout   7  u8  value codec
//   8  u32 numel: the group's length, below 2^31
//  12  u32 count: entries that follow; 0 if not finite
// No bytes follow a count of 0. Decoding throws Error on anything else: bytes missing or left over, a count
// above numel, positions that do not strictly ascend below numel, values that are not finite. Every layout
// and value codec is canonical: an accepted block has the very bytes that its layout and code write.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "nn/base/registry.h"

namespace topknot {

// A way to write values.
struct ValueCodec {
  std::uint8_t id = 0;
  bool exact = false;  // decode(encode(x)) == x
  // Whether fillers (IndexLayout) have values, for which +0 must come back as +0 next to any others.
  bool fills = true;
  std::size_t (*bytes)(std::size_t count);  // at least a bit per value; 0 of none
  // Appends bytes(values.size()) bytes. What decodes from finite values is finite.
  void (*encode)(std::span<const float> values, std::vector<std::byte>& out);
  // `in` has bytes(out.size()) bytes, or all there is. Throws Error if they are not what encode() writes; values that are not
  // finite may come out, read_block refuses them.
  void (*decode)(std::span<const std::byte> in, std::span<float> out);
  // The least length, if it depends on the values; bytes() is then a guess that decode() checks. Else null.
  std::size_t (*least)(std::size_t count) = nullptr;
};

// A way to write positions; its functions are never called with none.
struct IndexLayout {
  // Bytes that encode() appends, and fillers that it asks for.
  struct Size {
    std::size_t bytes = 0, fillers = 0;
  };

  std::uint8_t id = 0;
  bool only_all = false;  // writes every position or none
  // Bytes of `count` positions without fillers' values: exact for raw, bitmap and all, else the expectation
  // if positions are drawn uniformly. 0 for none.
  double (*expected_bytes)(std::size_t count, std::size_t numel);
  Size (*size)(std::span<const std::uint32_t> indices, std::size_t numel);
  // Appends positions, strictly ascending and below numel. `fillers`, empty before, gets the value slots that
  // belong to no position, ascending: run16 has them. A filler's value is +0.
  void (*encode)(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
                 std::vector<std::uint32_t>& fillers);
  // Reads out.size() positions from the start of `in` and returns the bytes used. Throws Error if `in` is too
  // short or not what encode() writes; read_block checks order and range.
  std::size_t (*decode)(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                        std::vector<std::uint32_t>& fillers);

  bool fits(std::size_t count, std::size_t numel) const { return count > 0 && (!only_all || count == numel); }
};
extern const IndexLayout kRawLayout, kRun16Layout, kRiceLayout, kBitmapLayout, kAllLayout, kAnsLayout;

// A value of compress.codec: one layout, or several (auto), of which each message takes the one that makes it
// smallest, fillers' values counted; ties go to the first. Messages without entries take the first.
struct IndexCodec {
  std::vector<const IndexLayout*> layouts;

  const IndexLayout& choose(std::span<const std::uint32_t> indices, std::size_t numel,
                            const ValueCodec& values) const;
  // The layout that a reader of this code accepts under that number, or null.
  const IndexLayout* find(std::uint8_t id) const {
    for (const IndexLayout* layout : layouts)
      if (layout->id == id) return layout;
    return nullptr;
  }
  // IndexLayout::expected_bytes() of the smallest.
  double expected_bytes(std::size_t count, std::size_t numel) const;
};

Registry<IndexCodec>& index_codecs();  // compress.codec
Registry<ValueCodec>& value_codecs();  // compress.values

inline constexpr std::size_t kBlockHeaderBytes = 16;

std::vector<std::byte> write_block(const SparseVector& entries, std::size_t numel,
                                   const IndexCodec& index_codec, const ValueCodec& value_codec);
// `entries` is reused memory. Error on a damaged block, before much more memory than its length is taken.
void read_block(std::span<const std::byte> block, std::size_t numel, const IndexCodec& index_codec,
                const ValueCodec& value_codec, SparseVector& entries);

// Bytes of a block of `count` entries, as exact as IndexCodec::expected_bytes(). UserError: unknown name.
std::size_t expected_block_bytes(const std::string& codec, const std::string& values, std::size_t count,
                                 std::size_t numel);

[[noreturn]] void damaged_block(const std::string& what);  // throws Error

}  // namespace topknot
