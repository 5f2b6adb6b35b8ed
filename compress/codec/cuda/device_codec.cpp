#include "compress/codec/cuda/device_codec.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "compress/codec/code_bits.h"
#include "compress/codec/codec.h"
#include "nn/base/check.h"

namespace topknot::cuda {
namespace {

std::size_t parts_of(std::size_t n, std::size_t each) {
  return (n + each - 1) / each;
}

// The most that `count` positions take under their own b: their runs add up to numel - count at most, and a
// part leaves up to 7 bits of its last byte.
std::size_t rice_section(std::size_t count, std::size_t numel) {
  const unsigned b = rice_parameter(count, numel);
  const std::size_t parts = parts_of(count, kRicePart);
  return 1 + 4 * parts + (count * (1 + b) + ((numel - count) >> b) + 7 * parts) / 8;
}

std::size_t longest_rice(Values values, std::size_t capacity, std::size_t numel) {
  // b falls as the count grows, and while b stays the length grows with it: the longest block has the
  // greatest count of some b.
  std::size_t longest = 0, count = capacity;
  while (count > 0) {
    longest = std::max(longest, rice_section(count, numel) + value_bytes(values, count));
    const unsigned b = rice_parameter(count, numel);
    std::size_t below = 0, above = count;  // b is greater at `below` (or that is 0), the same at `above`
    while (above - below > 1) {
      const std::size_t middle = (below + above) / 2;
      (rice_parameter(middle, numel) > b ? below : above) = middle;
    }
    count = below;
  }
  return longest;
}

template <class Code>
std::optional<Code> by_name(const std::string& name,
                            std::initializer_list<std::pair<const char*, Code>> known) {
  for (const auto& [its, code] : known)
    if (name == its) return code;
  return std::nullopt;
}

}  // namespace

std::size_t longest_block(Layout layout, Values values, std::size_t capacity, std::size_t numel) {
  std::size_t body = 0;
  if (capacity > 0 && layout == Layout::rice) body = longest_rice(values, capacity, numel);
  if (capacity > 0 && layout == Layout::raw) body = 4 * capacity + value_bytes(values, capacity);
  if (capacity > 0 && layout == Layout::bitmap) body = (numel + 7) / 8 + value_bytes(values, capacity);
  return (kBlockHeaderBytes + body + 15) / 16 * 16;
}

DeviceCodec::DeviceCodec(Layout layout, Values values, std::size_t numel, int ranks) {
  TOPKNOT_CHECK(numel <= std::numeric_limits<std::int32_t>::max() && ranks >= 1 && ranks <= 65535,
                "a group of this size has no blocks");
  work_.layout = layout;
  work_.values = values;
  work_.numel = static_cast<std::uint32_t>(numel);
  work_.ranks = ranks;
  places_ = DeviceArray<BlockPlace>(1 + static_cast<std::size_t>(ranks));
}

std::size_t DeviceCodec::block_bytes(std::size_t capacity) const {
  return longest_block(work_.layout, work_.values, capacity, work_.numel) + kTrailerBytes;
}

void DeviceCodec::set_capacity(std::size_t capacity) {
  TOPKNOT_CHECK(capacity <= work_.numel, "a capacity above the group's length");
  work_.capacity = static_cast<std::uint32_t>(capacity);
  work_.block_bytes = block_bytes(capacity);
  const auto at_least_one = [](std::size_t n) {
    return static_cast<std::uint32_t>(std::max<std::size_t>(n, 1));
  };
  write_parts_ = at_least_one(parts_of(capacity, kRicePart));
  read_parts_ =
      work_.layout == Layout::bitmap ? at_least_one(parts_of(work_.numel, kBitmapChunk)) : write_parts_;
  const std::size_t words = 2 * (write_parts_ + read_parts_ * static_cast<std::size_t>(work_.ranks));
  if (words > scratch_.size()) scratch_ = DeviceArray<std::uint32_t>(words);
}

BlockWork DeviceCodec::writing() const {
  BlockWork work = work_;
  work.ranks = 1;
  work.place = places_.data();
  work.parts = write_parts_;
  work.sizes = scratch_.data();
  work.starts = work.sizes + write_parts_;
  return work;
}

BlockWork DeviceCodec::reading() const {
  BlockWork work = work_;
  work.place = places_.data() + 1;
  work.parts = read_parts_;
  work.sizes = scratch_.data() + 2 * std::size_t{write_parts_};
  work.starts = work.sizes + read_parts_ * static_cast<std::size_t>(work_.ranks);
  return work;
}

void DeviceCodec::write(cudaStream_t stream, const DeviceEntries& entries, std::byte* block) {
  TOPKNOT_CHECK(work_.block_bytes > 0, "set_capacity() comes first");
  const BlockWork work = writing();
  TOPKNOT_CUDA(cudaMemsetAsync(block, 0, work.block_bytes, stream));
  if (work.layout == Layout::raw) write_raw(stream, work, entries, block);
  if (work.layout == Layout::rice) write_rice(stream, work, entries, block);
  if (work.layout == Layout::bitmap) write_bitmap(stream, work, entries, block);
  write_values(stream, work, entries, block);
}

void DeviceCodec::read(cudaStream_t stream, const std::byte* blocks, const DecodedEntries& out) {
  TOPKNOT_CHECK(work_.block_bytes > 0, "set_capacity() comes first");
  const BlockWork work = reading();
  read_headers(stream, work, blocks, out);
  if (work.layout == Layout::raw) read_raw(stream, work, blocks, out);
  if (work.layout == Layout::rice) read_rice(stream, work, blocks, out);
  if (work.layout == Layout::bitmap) read_bitmap(stream, work, blocks, out);
  read_values(stream, work, blocks, out);
}

std::unique_ptr<DeviceCodec> make_device_codec(const std::string& code, const std::string& values,
                                               std::size_t numel, int ranks) {
  const auto layout =
      by_name<Layout>(code, {{"raw", Layout::raw}, {"rice", Layout::rice}, {"bitmap", Layout::bitmap}});
  const auto value_codec = by_name<Values>(
      values,
      {{"fp32", Values::fp32}, {"bf16", Values::bf16}, {"fp16", Values::fp16}, {"int8", Values::int8}});
  if (!layout || !value_codec) return nullptr;
  return std::make_unique<DeviceCodec>(*layout, *value_codec, numel, ranks);
}

}  // namespace topknot::cuda
