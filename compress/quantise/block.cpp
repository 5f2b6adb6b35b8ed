#include "compress/quantise/block.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "compress/parallel.h"
#include "compress/select/passes/keys.h"
#include "nn/base/check.h"
#include "nn/core/simd.h"

namespace topknot::quantise {
namespace {

constexpr std::size_t kTrits = 5;  // a byte; 3^5 = 243

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
    // Up to three bytes hold a code; those after the end count as zeros.
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

// Codes to bytes: `out` begins with the byte of the first code.

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

// Bytes to codes: any range of entries, as what a scale is multiplied with.

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

// x *= scale; a product of zero and anything is +0.
TOPKNOT_MULTIVERSION void scale_values(float* x, std::size_t count, float scale) {
  for (std::size_t i = 0; i < count; ++i) x[i] = x[i] * scale + 0.0f;
}

// Whether all bits after the first `bits` are zero in the last byte.
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

// Digits after the last entry too.
bool trits_in_range(std::span<const std::byte> in, std::size_t count) {
  std::uint8_t largest = 0;
  for (const std::byte byte : in) largest = std::max(largest, static_cast<std::uint8_t>(byte));
  if (largest > 242) return false;
  if (count % kTrits == 0) return true;
  const auto& digits = kTritTable[static_cast<std::size_t>(in[count / kTrits])];
  return std::all_of(digits.begin() + static_cast<std::ptrdiff_t>(count % kTrits), digits.end(),
                     [](float digit) { return digit == 0.0f; });
}

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
  if (block.size() < sizeof header) damaged(std::to_string(block.size()) + " bytes are no header");
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
    damaged("for " + std::to_string(header.numel) + " elements where the group has " +
            std::to_string(format.numel));
  const bool finite = header.flags & BlockHeader::kFiniteFlag;
  const std::size_t bytes = finite ? format.bytes() : kHeaderBytes;
  if (block.size() != bytes)
    damaged(std::to_string(block.size()) + " bytes where there must be " + std::to_string(bytes));
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
