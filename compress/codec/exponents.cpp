#include "compress/codec/exponents.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "compress/codec/codec.h"
#include "compress/parallel.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

using Half = std::uint16_t;
typedef Half Halves __attribute__((vector_size(32)));

constexpr std::size_t kCodingBytes = 4, kBlocksPerThread = 16;  // at least
constexpr std::size_t kStrips = 16;  // codes of one word's place: the bits of a word, so that w words hold 16
constexpr unsigned kMostWidth = 8;
constexpr std::uint8_t kZerosLeftOut = 0x80;

template <class T>
constexpr bool kWide = sizeof(T) > sizeof(Half);  // whether a value has a lower half

// A value's upper half is a bfloat16: sign, exponent, 7 bits of mantissa.
TOPKNOT_INLINE Half exponent_of(Half upper) {
  return (upper >> 7) & 0xFF;
}

// A block's values in halves. What is after `count` is of no use, but may be written.
struct Halved {
  std::size_t count = 0;
  alignas(64) std::array<Half, kExponentBlock + kStrips> upper, lower;

  std::size_t strip() const { return count / kStrips; }
  std::size_t body() const { return strip() * kStrips; }  // values with codes
};

struct Coding {
  std::uint8_t first = 0, width = 0;
  bool zeros_left_out = false;
  std::uint16_t escapes = 0;
};

std::size_t bitmap_bytes(std::size_t n, const Coding& coding) {
  return coding.zeros_left_out ? (n + 7) / 8 : 0;
}
std::size_t code_bytes(std::size_t strip, unsigned width) {
  return strip * width * sizeof(Half);
}
// After the bitmap.
template <class T>
std::size_t value_bytes(std::size_t count, const Coding& coding) {
  return count * (sizeof(T) - 1) + code_bytes(count / kStrips, coding.width) + count % kStrips +
         coding.escapes;
}
// Exponents that have a code.
unsigned window_size(unsigned width) {
  return width == 0 ? 1 : (1u << width) - (width < kMostWidth);
}
// The code of the others; above all codes where there is none.
unsigned escape_of(unsigned width) {
  return width == 0 ? 1u << kMostWidth : window_size(width);
}

// The loops of a block, in vectors of what the machine has.

// Returns how many are +0.
template <class T>
TOPKNOT_INLINE std::size_t halve_values(const T* values, std::size_t n, Half* upper, Half* lower) {
  using Bits = std::conditional_t<kWide<T>, std::uint32_t, Half>;
  Bits zeros = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<Bits>(values[i]);
    upper[i] = static_cast<Half>(bits >> (kWide<T> ? 16 : 0));
    if constexpr (kWide<T>) lower[i] = static_cast<Half>(bits);
    zeros += static_cast<Bits>(bits == 0);
  }
  return zeros;
}
TOPKNOT_MULTIVERSION std::size_t halve(const float* values, std::size_t n, Half* upper, Half* lower) {
  return halve_values(values, n, upper, lower);
}
TOPKNOT_MULTIVERSION std::size_t halve(const BFloat16* values, std::size_t n, Half* upper, Half* lower) {
  return halve_values(values, n, upper, lower);
}
TOPKNOT_MULTIVERSION void join(const Half* upper, const Half* lower, std::size_t n, float* values) {
  for (std::size_t i = 0; i < n; ++i)
    values[i] = std::bit_cast<float>(std::uint32_t{upper[i]} << 16 | lower[i]);
}
void join(const Half* upper, const Half*, std::size_t n, BFloat16* values) {
  std::memcpy(static_cast<void*>(values), upper, n * sizeof(Half));
}

TOPKNOT_MULTIVERSION void split_upper(const Half* upper, std::size_t n, unsigned first, unsigned escape,
                                      std::uint8_t* sign_mantissa, Half* codes) {
  for (std::size_t i = 0; i < n; ++i) {
    sign_mantissa[i] = static_cast<std::uint8_t>((upper[i] >> 8 & 0x80) | (upper[i] & 0x7F));
    const Half above = static_cast<Half>(exponent_of(upper[i]) - first);  // below the first: above all codes
    codes[i] = std::min(above, static_cast<Half>(escape));
  }
}
TOPKNOT_MULTIVERSION void join_upper(const std::uint8_t* sign_mantissa, const Half* codes, std::size_t n,
                                     unsigned first, Half* upper) {
  for (std::size_t i = 0; i < n; ++i)
    upper[i] = static_cast<Half>((sign_mantissa[i] & 0x80) << 8 | (codes[i] + first) << 7 |
                                 (sign_mantissa[i] & 0x7F));
}

// Code s * strip + i stands in the words w * strip + i, at bit s * W of their W * 16. V: of `i` so many at a time.
template <class V>
TOPKNOT_INLINE V load_halves(const Half* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <unsigned W, class V>
TOPKNOT_INLINE void pack_codes(const Half* codes, std::size_t strip, std::size_t i, Half* words) {
  V packed[W] = {};
#pragma GCC unroll 16
  for (unsigned s = 0; s < kStrips; ++s) {
    const V code = load_halves<V>(codes + s * strip + i);
    const unsigned word = s * W / 16, shift = s * W % 16;
    packed[word] |= static_cast<V>(code << shift);
    if (shift + W > 16) packed[word + 1] |= static_cast<V>(code >> (16 - shift));
  }
#pragma GCC unroll 8
  for (unsigned w = 0; w < W; ++w) std::memcpy(words + w * strip + i, &packed[w], sizeof(V));
}
template <unsigned W, class V>
TOPKNOT_INLINE void unpack_codes(const Half* words, std::size_t strip, std::size_t i, Half* codes) {
  V packed[W];
#pragma GCC unroll 8
  for (unsigned w = 0; w < W; ++w) packed[w] = load_halves<V>(words + w * strip + i);
#pragma GCC unroll 16
  for (unsigned s = 0; s < kStrips; ++s) {
    const unsigned word = s * W / 16, shift = s * W % 16;
    V code = packed[word] >> shift;
    if (shift + W > 16) code |= static_cast<V>(packed[word + 1] << (16 - shift));
    code &= static_cast<Half>((1u << W) - 1);
    std::memcpy(codes + s * strip + i, &code, sizeof code);
  }
}
// fn(i, W, V()) for all of a strip: V is Halves, of 16 at a time, then, for what is left, Half. Fn is always inlined.
template <unsigned W, class Fn>
TOPKNOT_INLINE void in_strip(std::size_t strip, const Fn& fn) {
  constexpr std::size_t kStep = sizeof(Halves) / sizeof(Half);
  std::size_t i = 0;
  for (; i + kStep <= strip; i += kStep) fn(i, std::integral_constant<unsigned, W>(), Halves{});
  for (; i < strip; ++i) fn(i, std::integral_constant<unsigned, W>(), Half{});
}
template <unsigned W = kMostWidth, class Fn>
TOPKNOT_INLINE void of_width(unsigned width, std::size_t strip, const Fn& fn) {
  if (width == W) return in_strip<W>(strip, fn);
  if constexpr (W > 1) of_width<W - 1>(width, strip, fn);
}
TOPKNOT_MULTIVERSION void pack(unsigned width, const Half* codes, std::size_t strip, Half* words) {
  of_width(
      width, strip, [&](std::size_t i, auto w, auto v) __attribute__((always_inline)) {
        pack_codes<w(), decltype(v)>(codes, strip, i, words);
      });
}
TOPKNOT_MULTIVERSION void unpack(unsigned width, const Half* words, std::size_t strip, Half* codes) {
  if (width == 0) return std::fill_n(codes, strip * kStrips, Half{0}), void();
  of_width(
      width, strip, [&](std::size_t i, auto w, auto v) __attribute__((always_inline)) {
        unpack_codes<w(), decltype(v)>(words, strip, i, codes);
      });
}

// The choice of a block's header.

using ExponentCounts = std::array<std::uint32_t, 256>;  // by exponent

// The window with the smallest codes for strips of `strip` codes; ties go to the narrowest and first.
Coding smallest_window(const ExponentCounts& counts, std::size_t strip) {
  std::size_t low = 0, high = counts.size() - 1;
  while (low < high && counts[low] == 0) ++low;
  while (high > low && counts[high] == 0) --high;
  std::array<std::uint32_t, 257> below{};  // how many have a lower exponent
  for (std::size_t e = 0; e < counts.size(); ++e) below[e + 1] = below[e] + counts[e];
  const std::uint32_t all = below.back();

  Coding best{0, kMostWidth};
  for (unsigned width = kMostWidth; width-- > 0;) {
    const std::size_t size = window_size(width), most_first = counts.size() - size;
    const std::size_t begin = std::min(low, most_first),
                      last = high + 1 > begin + size ? high + 1 - size : begin;
    Coding window{0, static_cast<std::uint8_t>(width)};
    std::uint32_t most = 0;
    for (std::size_t first = begin; first <= last; ++first) {
      const std::uint32_t inside = below[first + size] - below[first];
      if (inside <= most) continue;
      most = inside;
      window.first = static_cast<std::uint8_t>(first);
    }
    if (width == 0 && most < all) continue;  // there is no code for an escape
    window.escapes = static_cast<std::uint16_t>(all - most);
    if (code_bytes(strip, width) + window.escapes <= code_bytes(strip, best.width) + best.escapes)
      best = window;
  }
  return best;
}

void count_exponents(const Halved& halved, ExponentCounts& counts) {
  // Four tables: neighbours are often equal, and an increment would wait for the one before.
  std::uint32_t table[4][256] = {};
  std::size_t i = 0;
  for (; i + 4 <= halved.count; i += 4)
    for (std::size_t t = 0; t < 4; ++t) ++table[t][exponent_of(halved.upper[i + t])];
  for (; i < halved.count; ++i) ++table[0][exponent_of(halved.upper[i])];
  for (std::size_t e = 0; e < counts.size(); ++e)
    counts[e] = table[0][e] + table[1][e] + table[2][e] + table[3][e];
}

// WIDE: whether values have lower halves.
template <bool WIDE>
bool is_zero(const Halved& halved, std::size_t i) {
  return (halved.upper[i] | (WIDE ? halved.lower[i] : 0)) == 0;
}

struct BlockPlan {
  Coding coding;
  std::size_t count = 0, bytes = 0;
};

template <class T>
BlockPlan plan_block(std::span<const T> values) {
  Halved halved;
  halved.count = values.size();
  const std::size_t zeros = halve(values.data(), values.size(), halved.upper.data(), halved.lower.data());
  ExponentCounts counts;
  count_exponents(halved, counts);

  // Plans all values, or with `leave_out` those that are not +0. The last count % kStrips have no codes.
  const auto plan = [&](bool leave_out) {
    ExponentCounts coded = counts;
    if (leave_out) coded[0] -= static_cast<std::uint32_t>(zeros);
    BlockPlan made;
    made.count = values.size() - (leave_out ? zeros : 0);
    std::size_t tail = made.count % kStrips;
    for (std::size_t i = values.size(); tail > 0; --tail) {
      do --i;
      while (leave_out && is_zero<kWide<T>>(halved, i));
      --coded[exponent_of(halved.upper[i])];
    }
    made.coding = smallest_window(coded, made.count / kStrips);
    made.coding.zeros_left_out = leave_out;
    made.bytes =
        kCodingBytes + bitmap_bytes(values.size(), made.coding) + value_bytes<T>(made.count, made.coding);
    return made;
  };
  const BlockPlan all = plan(false);
  if (zeros == 0) return all;
  const BlockPlan without = plan(true);
  return without.bytes < all.bytes ? without : all;
}

// Leaves out zeros, and says in the bitmap where there are none. Without a branch: they come as they like.
template <bool WIDE>
void leave_out_zeros(Halved& halved, std::byte* bitmap) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < halved.count; i += 8) {
    unsigned bits = 0;
    for (std::size_t j = i; j < std::min(halved.count, i + 8); ++j) {
      const unsigned keep = !is_zero<WIDE>(halved, j);
      bits |= keep << (j - i);
      halved.upper[kept] = halved.upper[j];
      if constexpr (WIDE) halved.lower[kept] = halved.lower[j];
      kept += keep;
    }
    bitmap[i / 8] = static_cast<std::byte>(bits);
  }
  halved.count = kept;
}

// The reverse, for `n` values. From the back, so that none is overwritten before it has moved.
template <bool WIDE>
void put_zeros_back(Halved& halved, const std::byte* bitmap, std::size_t n) {
  std::size_t left = halved.count;
  for (std::size_t i = n; i-- > 0;) {
    const unsigned keep = std::to_integer<unsigned>(bitmap[i / 8]) >> (i % 8) & 1;
    const auto mask = static_cast<Half>(-keep);
    left -= keep;
    halved.upper[i] = halved.upper[left] & mask;
    if constexpr (WIDE) halved.lower[i] = halved.lower[left] & mask;
  }
  halved.count = n;
}

template <class T>
void encode_block(std::span<const T> values, const BlockPlan& plan, std::byte* out) {
  Halved halved;
  halved.count = values.size();
  halve(values.data(), values.size(), halved.upper.data(), halved.lower.data());
  const Coding& coding = plan.coding;
  out[0] = std::byte{coding.first};
  out[1] = static_cast<std::byte>(coding.width | (coding.zeros_left_out ? kZerosLeftOut : 0));
  std::memcpy(out + 2, &coding.escapes, sizeof coding.escapes);
  out += kCodingBytes;
  if (coding.zeros_left_out) {
    leave_out_zeros<kWide<T>>(halved, out);
    out += bitmap_bytes(values.size(), coding);
  }
  if (kWide<T>) {
    std::memcpy(out, halved.lower.data(), halved.count * sizeof(Half));
    out += halved.count * sizeof(Half);
  }
  alignas(64) std::array<std::uint8_t, kExponentBlock> sign_mantissa;
  alignas(64) std::array<Half, kExponentBlock> codes, words;
  const unsigned escape = escape_of(coding.width);
  split_upper(halved.upper.data(), halved.count, coding.first, escape, sign_mantissa.data(), codes.data());
  std::memcpy(out, sign_mantissa.data(), halved.count);
  out += halved.count;
  pack(coding.width, codes.data(), halved.strip(), words.data());
  std::memcpy(out, words.data(), code_bytes(halved.strip(), coding.width));
  out += code_bytes(halved.strip(), coding.width);
  for (std::size_t i = halved.body(); i < halved.count; ++i)
    *out++ = static_cast<std::byte>(exponent_of(halved.upper[i]));
  if (coding.escapes == 0) return;
  std::array<std::uint8_t, kExponentBlock + 1> escaped;  // without a branch: they come as they like
  std::size_t count = 0;
  for (std::size_t i = 0; i < halved.body(); ++i) {
    escaped[count] = static_cast<std::uint8_t>(exponent_of(halved.upper[i]));
    count += codes[i] == escape;
  }
  std::memcpy(out, escaped.data(), coding.escapes);
}

auto values_of(auto values, std::size_t block) {
  const std::size_t begin = block * kExponentBlock;
  return values.subspan(begin, std::min(kExponentBlock, values.size() - begin));
}

template <class T>
void encode_blocks(std::span<const T> values, std::vector<std::byte>& out) {
  const std::size_t blocks = (values.size() + kExponentBlock - 1) / kExponentBlock;
  std::vector<BlockPlan> plans(blocks);
  for_each_block(blocks, kBlocksPerThread,
                 [&](std::size_t b) { plans[b] = plan_block(values_of(values, b)); });
  std::vector<std::size_t> begins(blocks + 1);
  for (std::size_t b = 0; b < blocks; ++b) begins[b + 1] = begins[b] + plans[b].bytes;
  out.resize(begins.back());
  for_each_block(blocks, kBlocksPerThread, [&](std::size_t b) {
    encode_block(values_of(values, b), plans[b], out.data() + begins[b]);
  });
}

// A block as its header has it, of `n` values at the start of `in`. Throws Error if it is longer than that.
template <class T>
BlockPlan read_block_plan(std::span<const std::byte> in, std::size_t n) {
  if (in.size() < kCodingBytes) damaged_block("coded exponents: a header is cut off");
  BlockPlan plan;
  const auto second = std::to_integer<std::uint8_t>(in[1]);
  plan.coding.first = std::to_integer<std::uint8_t>(in[0]);
  plan.coding.width = second & ~kZerosLeftOut;
  plan.coding.zeros_left_out = second & kZerosLeftOut;
  std::memcpy(&plan.coding.escapes, in.data() + 2, sizeof plan.coding.escapes);
  if (plan.coding.width > kMostWidth) damaged_block("coded exponents: a width above 8");
  if (plan.coding.first + window_size(plan.coding.width) > 1u << kMostWidth)
    damaged_block("coded exponents: codes of exponents that there are not");
  const std::size_t bitmap = bitmap_bytes(n, plan.coding);
  if (in.size() < kCodingBytes + bitmap) damaged_block("coded exponents: a bitmap is cut off");
  plan.count = n;
  if (bitmap > 0) {
    const std::span<const std::byte> bytes = in.subspan(kCodingBytes, bitmap);
    plan.count = 0;
    for (std::size_t i = 0; i < bitmap; i += sizeof(std::uint64_t)) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, bytes.data() + i, std::min(bitmap - i, sizeof bits));
      plan.count += static_cast<std::size_t>(std::popcount(bits));
    }
    if (n % 8 > 0 && std::to_integer<unsigned>(bytes.back()) >> (n % 8) != 0)
      damaged_block("coded exponents: a bitmap of more values than there are");
  }
  plan.bytes = kCodingBytes + bitmap + value_bytes<T>(plan.count, plan.coding);
  if (in.size() < plan.bytes) damaged_block("coded exponents: a block is cut off");
  return plan;
}

// False where the codes have another number of escapes than the header.
template <class T>
bool decode_block(const std::byte* in, const BlockPlan& plan, std::span<T> values) {
  const Coding& coding = plan.coding;
  Halved halved;
  halved.count = plan.count;
  in += kCodingBytes;
  const std::byte* const bitmap = in;
  in += bitmap_bytes(values.size(), coding);
  if (kWide<T>) {
    std::memcpy(halved.lower.data(), in, halved.count * sizeof(Half));
    in += halved.count * sizeof(Half);
  }
  alignas(64) std::array<std::uint8_t, kExponentBlock> sign_mantissa;
  alignas(64) std::array<Half, kExponentBlock> codes, words;
  std::memcpy(sign_mantissa.data(), in, halved.count);
  in += halved.count;
  std::memcpy(words.data(), in, code_bytes(halved.strip(), coding.width));
  in += code_bytes(halved.strip(), coding.width);
  unpack(coding.width, words.data(), halved.strip(), codes.data());
  for (std::size_t i = halved.body(); i < halved.count; ++i)
    codes[i] = static_cast<Half>(std::to_integer<unsigned>(*in++) - coding.first);
  const unsigned escape = escape_of(coding.width);
  std::size_t escaped = 0;
  if (escape < 1u << kMostWidth && coding.escapes <= halved.body()) {
    std::array<std::uint8_t, kExponentBlock + 1> exponents{};
    std::memcpy(exponents.data(), in, coding.escapes);
    // A damaged block may have more escapes than exponents.
    for (std::size_t i = 0; i < halved.body(); ++i) {
      const bool is = codes[i] == escape;
      const auto code =
          static_cast<Half>(exponents[std::min<std::size_t>(escaped, kExponentBlock)] - coding.first);
      codes[i] = is ? code : codes[i];
      escaped += is;
    }
  }
  join_upper(sign_mantissa.data(), codes.data(), halved.count, coding.first, halved.upper.data());
  if (coding.zeros_left_out) put_zeros_back<kWide<T>>(halved, bitmap, values.size());
  join(halved.upper.data(), halved.lower.data(), halved.count, values.data());
  return escaped == coding.escapes;
}

template <class T>
void decode_blocks(std::span<const std::byte> in, std::span<T> values) {
  const std::size_t blocks = (values.size() + kExponentBlock - 1) / kExponentBlock;
  std::vector<BlockPlan> plans(blocks);
  std::vector<std::size_t> begins(blocks + 1);
  for (std::size_t b = 0; b < blocks; ++b) {
    plans[b] = read_block_plan<T>(in.subspan(begins[b]), values_of(values, b).size());
    begins[b + 1] = begins[b] + plans[b].bytes;
  }
  if (begins.back() != in.size()) damaged_block("coded exponents: bytes are left over");
  std::vector<std::uint8_t> fits(blocks);
  for_each_block(blocks, kBlocksPerThread, [&](std::size_t b) {
    fits[b] = decode_block(in.data() + begins[b], plans[b], values_of(values, b));
  });
  if (std::find(fits.begin(), fits.end(), 0) != fits.end())
    damaged_block("coded exponents: another number of escapes than the header has");
}

}  // namespace

void encode_exponents(std::span<const float> values, std::vector<std::byte>& out) {
  encode_blocks(values, out);
}
void encode_exponents(std::span<const BFloat16> values, std::vector<std::byte>& out) {
  encode_blocks(values, out);
}
void decode_exponents(std::span<const std::byte> in, std::span<float> values) {
  decode_blocks(in, values);
}
void decode_exponents(std::span<const std::byte> in, std::span<BFloat16> values) {
  decode_blocks(in, values);
}

}  // namespace topknot
