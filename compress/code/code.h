#pragma once
// Coding: selected entries as bytes on the wire. A block is a header, the positions in an index code, the
// values in a value code; a new code of either kind is one file that registers itself.
//
// The header, 16 bytes, little-endian:
//   0  u32 magic 0x544B4E54 ("TNKT")
//   4  u8  version, 1
//   5  u8  flags: bit 0 = every entry of the sender's accumulated gradient was finite; the other bits are 0
//   6  u8  index code     7  u8  value code
//   8  u32 numel: the group's length
//  12  u32 count: entries that follow; 0 where not finite
// Decoding throws Error on anything else: bytes missing or left over, a count above numel, positions that do
// not strictly ascend below numel, values that are not finite.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "compress/compressor.h"
#include "compress/entries.h"
#include "nn/core/registry.h"

namespace topknot {

class IndexCode {
 public:
  virtual ~IndexCode() = default;
  virtual std::uint8_t id() const = 0;
  // Appends positions, strictly ascending and below numel.
  virtual void encode(std::span<const std::uint32_t> indices, std::size_t numel,
                      std::vector<std::byte>& out) const = 0;
  // Reads out.size() positions from the start of `in` and returns the bytes used. Throws Error where `in` is
  // too short; read_block checks order and range.
  virtual std::size_t decode(std::span<const std::byte> in, std::size_t numel,
                             std::span<std::uint32_t> out) const = 0;
  // The fewest bytes that `count` positions can take, so that a damaged count is met before memory is asked
  // for.
  virtual std::size_t least_bytes(std::size_t count) const = 0;
};

class ValueCode {
 public:
  virtual ~ValueCode() = default;
  virtual std::uint8_t id() const = 0;
  virtual bool exact() const = 0;  // decode(encode(x)) == x
  virtual std::size_t bytes(std::size_t count) const = 0;
  virtual void encode(std::span<const float> values, std::vector<std::byte>& out) const = 0;
  // All of `in` is values; throws Error where its length is not that of out.size() values.
  virtual void decode(std::span<const std::byte> in, std::span<float> out) const = 0;
};

using IndexCodeFactory = std::unique_ptr<IndexCode> (*)(const CompressOptions& options);
using ValueCodeFactory = std::unique_ptr<ValueCode> (*)(const CompressOptions& options);
Registry<IndexCodeFactory>& index_codes();  // compress.code
Registry<ValueCodeFactory>& value_codes();  // compress.values

inline constexpr std::size_t kBlockHeaderBytes = 16;

std::vector<std::byte> write_block(const Entries<float>& entries, std::size_t numel,
                                   const IndexCode& index_code, const ValueCode& value_code);
// `entries` is reused memory. Throws Error on a damaged block.
void read_block(std::span<const std::byte> block, std::size_t numel, const IndexCode& index_code,
                const ValueCode& value_code, Entries<float>& entries);

}  // namespace topknot
