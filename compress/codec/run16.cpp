// u16 runs of zeros between entries, as Deep Gradient Compression (Lin et al., ICLR 2018, 3.1) sends them.
// The paper does not say what becomes of a run that 16 bits do not hold. Here an entry's word is 0 to 65534;
// the word 65535 is a filler: 65535 positions without an entry, and a slot of its own in the value section,
// which is +0. So 6 bytes per entry with fp32, fillers included.
#include <cmath>
#include <cstring>
#include <string>

#include "compress/codec/codec.h"

namespace topknot {
namespace {

constexpr std::uint32_t kFiller = 65535;

// A run is at least 65535 j long with probability (1 - density)^(65535 j): summed over j, an entry's fillers.

double run16_expected_bytes(std::size_t count, std::size_t numel) {
  if (count == 0) return 0.0;
  const double density = static_cast<double>(count) / static_cast<double>(numel);
  const double longer = density < 1.0 ? std::exp(kFiller * std::log1p(-density)) : 0.0;
  return 2.0 * static_cast<double>(count) / (1.0 - longer);
}

IndexLayout::Size run16_size(std::span<const std::uint32_t> indices, std::size_t) {
  std::size_t fillers = 0;
  std::uint32_t next = 0;
  for (const std::uint32_t index : indices) {
    fillers += (index - next) / kFiller;
    next = index + 1;
  }
  return {2 * (indices.size() + fillers), fillers};
}

void run16_encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
                  std::vector<std::uint32_t>& fillers) {
  const IndexLayout::Size total = run16_size(indices, numel);
  fillers.reserve(total.fillers);
  const std::size_t begin = out.size();
  out.resize(begin + total.bytes);
  std::byte* const words = out.data() + begin;
  std::size_t slot = 0;
  const auto put = [&](std::uint32_t value) {
    const auto word = static_cast<std::uint16_t>(value);
    std::memcpy(words + 2 * slot++, &word, sizeof word);
  };
  std::uint32_t next = 0;
  for (const std::uint32_t index : indices) {
    std::uint32_t run = index - next;
    for (; run >= kFiller; run -= kFiller) {
      fillers.push_back(static_cast<std::uint32_t>(slot));
      put(kFiller);
    }
    put(run);
    next = index + 1;
  }
}

std::size_t run16_decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                         std::vector<std::uint32_t>& fillers) {
  const std::size_t slots = in.size() / 2;
  std::size_t slot = 0, count = 0;
  std::uint64_t position = 0;
  while (count < out.size()) {
    if (slot == slots) damaged_block("runs are cut off");
    std::uint16_t word = 0;
    std::memcpy(&word, in.data() + 2 * slot, sizeof word);
    position += word;
    if (position >= numel) damaged_block("runs lead to position " + std::to_string(position));
    if (word == kFiller)
      fillers.push_back(static_cast<std::uint32_t>(slot));
    else
      out[count++] = static_cast<std::uint32_t>(position++);
    ++slot;
  }
  return 2 * slot;
}

const bool run16_registered =
    index_codecs().add("run16", "2 bytes per run of zeros, as DGC sends them", {{&kRun16Layout}});

}  // namespace

const IndexLayout kRun16Layout{1, false, run16_expected_bytes, run16_size, run16_encode, run16_decode};

}  // namespace topknot
