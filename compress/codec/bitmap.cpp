// A bit per element.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "compress/codec/codec.h"
#include "compress/parallel.h"

namespace topknot {
namespace {

std::size_t map_bytes(std::size_t numel) {
  return (numel + 7) / 8;
}

// Calls body(position, word) for the bits of positions [begin, end), up to 64 at a time; begin is a multiple
// of 8, and so is end unless the map ends there.
void for_words(const std::byte* map, std::size_t begin, std::size_t end, auto&& body) {
  for (; begin < end; begin += 64) {
    std::uint64_t word = 0;
    std::memcpy(&word, map + begin / 8, std::min<std::size_t>(8, map_bytes(end - begin)));
    body(begin, word);
  }
}

double bitmap_expected_bytes(std::size_t count, std::size_t numel) {
  return count == 0 ? 0.0 : static_cast<double>(map_bytes(numel));
}

IndexLayout::Size bitmap_size(std::span<const std::uint32_t>, std::size_t numel) {
  return {map_bytes(numel), 0};
}

void bitmap_encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
                   std::vector<std::uint32_t>&) {
  const std::size_t head = out.size();
  out.resize(head + map_bytes(numel));
  std::byte* const map = out.data() + head;
  for_parts(numel, part_count(numel), [&](std::size_t, std::size_t begin, std::size_t end) {
    const auto last = std::lower_bound(indices.begin(), indices.end(), end);
    for (auto at = std::lower_bound(indices.begin(), last, begin); at != last; ++at)
      map[*at / 8] |= static_cast<std::byte>(1u << (*at % 8));
  });
}

std::size_t bitmap_decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                          std::vector<std::uint32_t>&) {
  const std::size_t bytes = map_bytes(numel);
  if (in.size() < bytes) damaged_block("the bitmap is cut off");
  if (numel % 8 != 0 && (std::to_integer<unsigned>(in[bytes - 1]) >> (numel % 8)) != 0)
    damaged_block("bits beyond the group");
  const std::size_t parts = part_count(numel);
  std::vector<std::size_t> starts(parts + 1);
  for_parts(numel, parts, [&](std::size_t part, std::size_t begin, std::size_t end) {
    std::size_t count = 0;
    for_words(in.data(), begin, end, [&](std::size_t, std::uint64_t word) {
      count += static_cast<std::size_t>(std::popcount(word));
    });
    starts[part + 1] = count;
  });
  for (std::size_t part = 0; part < parts; ++part) starts[part + 1] += starts[part];
  if (starts[parts] != out.size())
    damaged_block(std::to_string(starts[parts]) + " bits for " + std::to_string(out.size()) + " entries");
  for_parts(numel, parts, [&](std::size_t part, std::size_t begin, std::size_t end) {
    std::uint32_t* to = out.data() + starts[part];
    for_words(in.data(), begin, end, [&](std::size_t position, std::uint64_t word) {
      for (; word != 0; word &= word - 1)
        *to++ = static_cast<std::uint32_t>(position) + static_cast<std::uint32_t>(std::countr_zero(word));
    });
  });
  return bytes;
}

const bool bitmap_registered = index_codecs().add("bitmap", "a bit per element", {{&kBitmapLayout}});

}  // namespace

const IndexLayout kBitmapLayout{3, false, bitmap_expected_bytes, bitmap_size, bitmap_encode, bitmap_decode};

}  // namespace topknot
