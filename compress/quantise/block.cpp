#include "compress/quantise/block.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "compress/parallel.h"
#include "compress/quantise/codes.h"
#include "compress/select/passes/keys.h"
#include "nn/base/check.h"

namespace topknot::quantise {
namespace {

static_assert(sizeof(BlockHeader) == 20 && std::endian::native == std::endian::little);

[[noreturn]] void damaged(const std::string& what) {
  throw Error("damaged quantised block: " + what);
}

BlockHeader header_of(const Format& format) {
  BlockHeader header;
  header.kind = static_cast<std::uint8_t>(format.kind);
  header.numel = static_cast<std::uint32_t>(format.numel);
  header.cells = static_cast<std::uint32_t>(format.cells.size());
  header.levels = format.levels;
  return header;
}

std::span<const std::byte> codes_of(const Format& format, std::span<const std::byte> block) {
  return block.subspan(kHeaderBytes + format.cells.size() * sizeof(float));
}

float scale_of(std::span<const std::byte> block, std::size_t cell) {
  float scale;
  std::memcpy(&scale, block.data() + kHeaderBytes + cell * sizeof scale, sizeof scale);
  return scale;
}

bool all_levels_in_range(const Format& format, std::span<const std::byte> codes) {
  const std::size_t parts = part_count(format.numel);
  std::vector<char> good(parts);
  for_parts(format.numel, parts, [&](std::size_t part, std::size_t begin, std::size_t end) {
    good[part] = levels_in_range(codes, begin, end, format.bits(), format.levels);
  });
  return std::all_of(good.begin(), good.end(), [](char part) { return part != 0; });
}

}  // namespace

int Format::bits() const {
  if (kind == Kind::levels) return 1 + std::bit_width(levels);
  return kind == Kind::sign ? 1 : 0;
}

std::size_t Format::code_bytes() const {
  if (kind == Kind::ternary) return (numel + kTrits - 1) / kTrits;
  return (numel * static_cast<std::size_t>(bits()) + 7) / 8;
}

std::vector<std::byte> start_block(const Format& format, bool finite) {
  BlockHeader header = header_of(format);
  header.flags = finite ? BlockHeader::kFiniteFlag : 0;
  std::vector<std::byte> block(finite ? format.bytes() : kHeaderBytes);
  std::memcpy(block.data(), &header, sizeof header);
  return block;
}

void write_scales(const Format& format, std::span<const float> scales, std::span<std::byte> block) {
  TOPKNOT_CHECK(scales.size() == format.cells.size() && block.size() == format.bytes(), "one scale per cell");
  if (!scales.empty()) std::memcpy(block.data() + kHeaderBytes, scales.data(), scales.size_bytes());
}

std::size_t code_step(const Format& format) {
  return format.kind == Kind::ternary ? kTrits : 8;
}

void write_codes(const Format& format, std::span<const std::int16_t> codes, std::size_t begin,
                 std::size_t end, std::span<std::byte> block) {
  std::byte* out = block.data() + (format.bytes() - format.code_bytes());
  const std::size_t count = end - begin;
  switch (format.kind) {
    case Kind::sign:
      return pack_bits(codes.data(), count, out + begin / 8);
    case Kind::levels: {
      const auto bits = static_cast<std::size_t>(format.bits());
      return pack_levels(codes.data(), count, format.bits(), out + begin / 8 * bits);
    }
    case Kind::ternary:
      return pack_trits(codes.data(), count, out + begin / kTrits);
  }
}

bool check_block(const Format& format, std::span<const std::byte> block) {
  BlockHeader header;
  if (block.size() < sizeof header) damaged(fmt::format("{} bytes are no header", block.size()));
  std::memcpy(&header, block.data(), sizeof header);
  const BlockHeader expected = header_of(format);
  if (header.magic != BlockHeader::kMagic || header.version != BlockHeader::kVersion || header.zero != 0)
    damaged("not a block of this version");
  if (header.flags & ~BlockHeader::kFiniteFlag) damaged("unknown flags");
  if (header.kind != expected.kind || header.cells != expected.cells || header.levels != expected.levels)
    damaged(
        "coded otherwise than here; do all ranks run with the same compress.name, .scope, .levels and "
        ".bucket?");
  if (header.numel != expected.numel)
    damaged(fmt::format("for {} elements where the group has {}", header.numel, format.numel));
  const bool finite = header.flags & BlockHeader::kFiniteFlag;
  const std::size_t bytes = finite ? format.bytes() : kHeaderBytes;
  if (block.size() != bytes) damaged(fmt::format("{} bytes where there must be {}", block.size(), bytes));
  if (!finite) return false;
  bool good = true;
  for (std::size_t cell = 0; cell < format.cells.size(); ++cell) {
    const auto bits = std::bit_cast<std::int32_t>(scale_of(block, cell));
    good &= bits >= 0 && bits <= kLargestFinite;
  }
  if (!good) damaged("a scale that is negative or not finite");
  const std::span<const std::byte> codes = codes_of(format, block);
  switch (format.kind) {
    case Kind::sign:
      if (!tail_is_zero(codes, format.numel)) damaged("bits behind the last entry");
      break;
    case Kind::levels:
      if (!tail_is_zero(codes, format.numel * static_cast<std::size_t>(format.bits())))
        damaged("bits behind the last entry");
      if (!all_levels_in_range(format, codes)) damaged("a level out of range");
      break;
    case Kind::ternary:
      if (!trits_in_range(codes, format.numel)) damaged("a byte that is no five digits of base 3");
      break;
  }
  return true;
}

float largest_scale(const Format& format, std::span<const std::byte> block) {
  float largest = 0;
  for (std::size_t cell = 0; cell < format.cells.size(); ++cell)
    largest = std::max(largest, scale_of(block, cell));
  return largest;
}

void read_values(const Format& format, std::span<const std::byte> block, std::size_t begin, std::size_t end,
                 std::size_t& cell, float* values) {
  const std::span<const std::byte> codes = codes_of(format, block);
  switch (format.kind) {
    case Kind::sign:
      unpack_bits(codes, begin, end, values);
      break;
    case Kind::levels:
      unpack_levels(codes, begin, end, format.bits(), format.levels, values);
      break;
    case Kind::ternary:
      unpack_trits(codes, begin, end, values);
      break;
  }
  for (std::size_t i = begin; i < end;) {
    const std::size_t stop = std::min<std::size_t>(end, format.cells[cell]);
    scale_values(values + (i - begin), stop - i, scale_of(block, cell));
    i = stop;
    if (stop == format.cells[cell]) ++cell;
  }
}

std::size_t cell_of(const Format& format, std::size_t entry) {
  return static_cast<std::size_t>(std::upper_bound(format.cells.begin(), format.cells.end(), entry) -
                                  format.cells.begin());
}

bool read_block(const Format& format, std::span<const std::byte> block, std::span<float> out) {
  TOPKNOT_CHECK(out.size() == format.numel, "one value an entry");
  if (!check_block(format, block)) return false;
  std::size_t cell = 0;
  read_values(format, block, 0, format.numel, cell, out.data());
  return true;
}

}  // namespace topknot::quantise
