// Golomb-Rice code (Golomb 1966; Rice 1979) of the runs of zeros between entries: the run's quotient by 2^b
// in unary, then b bits of remainder. b = round(log2(0.693 / density)), the best for positions drawn
// uniformly. Cut into parts of kRicePart entries that begin at whole bytes, so that threads (and a GPU)
// write and read them side by side; a u32 per part says where its bits end.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "compress/codec/bit_stream.h"
#include "compress/codec/code_bits.h"
#include "compress/codec/codec.h"
#include "compress/parallel.h"

namespace topknot {
namespace {

constexpr std::size_t kPart = kRicePart, kPartsPerThread = 16;  // at least

std::size_t part_total(std::size_t count) {
  return (count + kPart - 1) / kPart;
}

// The bits that one part's entries take.
std::uint64_t part_bits(std::span<const std::uint32_t> indices, std::size_t part, unsigned b) {
  const std::size_t begin = part * kPart, end = std::min(indices.size(), begin + kPart);
  std::uint32_t next = begin == 0 ? 0 : indices[begin - 1] + 1;
  std::uint64_t bits = (end - begin) * (1 + b);
  for (std::size_t i = begin; i < end; ++i) {
    bits += (indices[i] - next) >> b;
    next = indices[i] + 1;
  }
  return bits;
}

// The end of each part's bits; a part begins at the next whole byte.
std::vector<std::uint32_t> part_ends(std::span<const std::uint32_t> indices, unsigned b) {
  std::vector<std::uint32_t> ends(part_total(indices.size()));
  for_each_block(ends.size(), kPartsPerThread, [&](std::size_t part) {
    ends[part] = static_cast<std::uint32_t>(part_bits(indices, part, b));
  });
  // With this b all of it takes less than 1.5 numel bits, and numel is below 2^31.
  std::uint64_t at = 0;
  for (std::uint32_t& end : ends) {
    at = (at + 7) / 8 * 8 + end;
    end = static_cast<std::uint32_t>(at);
  }
  return ends;
}

// Positions of a part, from its first possible one on. Returns how many positions it spans, 0 if damaged.
std::uint64_t read_part(std::span<const std::byte> in, std::size_t bits, unsigned b, std::size_t numel,
                        std::span<std::uint32_t> out) {
  BitReader reader(in.data(), in.data() + in.size());
  std::uint64_t next = 0, used = 0;
  for (std::uint32_t& index : out) {
    std::uint64_t quotient = 0, remainder = 0;
    if (!reader.unary(quotient) || !reader.get(b, remainder)) return 0;
    next += (quotient << b) + remainder;
    if (next >= numel) return 0;
    index = static_cast<std::uint32_t>(next++);
    used += quotient + 1 + b;
  }
  return used == bits && reader.done() ? next : 0;
}

double rice_expected_bytes(std::size_t count, std::size_t numel) {
  if (count == 0) return 0.0;
  const double density = static_cast<double>(count) / static_cast<double>(numel);
  const unsigned b = rice_parameter(count, numel);
  const double one_more =
      density < 1.0 ? std::exp(std::ldexp(std::log1p(-density), static_cast<int>(b))) : 0.0;
  const double bits = 1.0 + b + one_more / (1.0 - one_more);
  const auto parts = static_cast<double>(part_total(count));
  return 1.0 + 4.0 * parts + std::ceil(bits * static_cast<double>(count) / 8 + parts * 3.5 / 8);
}

IndexLayout::Size rice_size(std::span<const std::uint32_t> indices, std::size_t numel) {
  const std::vector<std::uint32_t> ends = part_ends(indices, rice_parameter(indices.size(), numel));
  return {1 + 4 * ends.size() + (std::size_t{ends.back()} + 7) / 8, 0};
}

void rice_encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
                 std::vector<std::uint32_t>&) {
  const unsigned b = rice_parameter(indices.size(), numel);
  const std::vector<std::uint32_t> ends = part_ends(indices, b);
  const std::size_t head = out.size(), body = head + 1 + 4 * ends.size();
  out.resize(body + (std::size_t{ends.back()} + 7) / 8);
  out[head] = static_cast<std::byte>(b);
  std::memcpy(out.data() + head + 1, ends.data(), 4 * ends.size());
  std::byte* const stream = out.data() + body;
  for_each_block(ends.size(), kPartsPerThread, [&](std::size_t part) {
    const std::size_t begin = part * kPart, end = std::min(indices.size(), begin + kPart);
    BitWriter writer(stream + (part == 0 ? 0 : (std::size_t{ends[part - 1]} + 7) / 8));
    std::uint32_t next = begin == 0 ? 0 : indices[begin - 1] + 1;
    const std::uint32_t mask = (1u << b) - 1;
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t run = indices[i] - next, quotient = run >> b;
      // The one that ends the unary part, and the remainder above it: b + 1 bits.
      std::uint64_t bits = 1 | std::uint64_t{run & mask} << 1;
      unsigned count = b + 1;
      if (quotient + count <= 32) {
        bits <<= quotient;
        count += quotient;
      } else {
        writer.zeros(quotient);
      }
      writer.put(bits, count);
      next = indices[i] + 1;
    }
    writer.flush();
  });
}

std::size_t rice_decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                        std::vector<std::uint32_t>&) {
  const std::size_t parts = part_total(out.size()), body = 1 + 4 * parts;
  if (in.size() < body) damaged_block("Rice parts are cut off");
  const auto b = std::to_integer<unsigned>(in[0]);
  if (b != rice_parameter(out.size(), numel)) damaged_block("Rice parameter " + std::to_string(b));
  std::vector<std::uint32_t> ends(parts);
  std::memcpy(ends.data(), in.data() + 1, 4 * parts);
  const std::span<const std::byte> bits = in.subspan(body);
  std::size_t begin = 0;  // in bytes
  for (const std::uint32_t end : ends) {
    if (end < 8 * begin || (std::size_t{end} + 7) / 8 > bits.size()) damaged_block("a Rice part's length");
    begin = (std::size_t{end} + 7) / 8;
  }
  const std::size_t used = begin;

  std::vector<std::uint64_t> spans(parts);
  const auto entries_of = [&](std::size_t part) {
    return out.subspan(part * kPart, std::min(kPart, out.size() - part * kPart));
  };
  for_each_block(parts, kPartsPerThread, [&](std::size_t part) {
    const std::size_t first = part == 0 ? 0 : (std::size_t{ends[part - 1]} + 7) / 8;
    const std::size_t last = (std::size_t{ends[part]} + 7) / 8;
    spans[part] =
        read_part(bits.subspan(first, last - first), ends[part] - 8 * first, b, numel, entries_of(part));
  });
  std::uint64_t total = 0;
  for (std::uint64_t& span : spans) {
    if (span == 0) damaged_block("a Rice part's bits");
    total += span;
    span = total - span;  // now: where the part begins
  }
  if (total > numel) damaged_block("Rice runs lead beyond the group");
  for_each_block(parts, kPartsPerThread, [&](std::size_t part) {
    for (std::uint32_t& index : entries_of(part)) index += static_cast<std::uint32_t>(spans[part]);
  });
  return body + used;
}

const bool rice_registered =
    index_codecs().add("rice", "runs of zeros in Golomb-Rice code", {{&kRiceLayout}});

}  // namespace

const IndexLayout kRiceLayout{2, false, rice_expected_bytes, rice_size, rice_encode, rice_decode};

}  // namespace topknot
