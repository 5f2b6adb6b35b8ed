#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "compress/codec/code_bits.h"
#include "compress/codec/codec.h"
#include "compress/select/passes/keys.h"
#include "nn/base/check.h"

namespace topknot {

void damaged_block(const std::string& what) {
  throw Error("damaged gradient block: " + what);
}

namespace {

using Header = BlockHeader;
static_assert(sizeof(Header) == kBlockHeaderBytes && std::endian::native == std::endian::little);

void check_positions(std::span<const std::uint32_t> indices, std::size_t numel) {
  std::int64_t last = -1;
  bool ascending = true;
  for (const std::uint32_t index : indices) {
    ascending &= static_cast<std::int64_t>(index) > last;
    last = index;
  }
  if (!ascending) damaged_block("positions do not ascend");
  if (last >= static_cast<std::int64_t>(numel))
    damaged_block("position " + std::to_string(last) + " of " + std::to_string(numel));
}

// Moves the values of positions to the front. The fillers' must be +0.
void drop_fillers(std::vector<float>& values, std::span<const std::uint32_t> fillers) {
  std::size_t kept = 0, filler = 0;
  for (std::size_t slot = 0; slot < values.size(); ++slot) {
    if (filler == fillers.size() || slot != fillers[filler]) {
      values[kept++] = values[slot];
      continue;
    }
    ++filler;
    if (std::bit_cast<std::uint32_t>(values[slot]) != 0) damaged_block("a filler with a value");
  }
  values.resize(kept);
}

std::vector<float> with_fillers(std::span<const float> values, std::span<const std::uint32_t> fillers) {
  std::vector<float> slots(values.size() + fillers.size());
  std::size_t next = 0, filler = 0;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (filler < fillers.size() && slot == fillers[filler])
      ++filler;
    else
      slots[slot] = values[next++];
  }
  return slots;
}

const bool codecs_registered[] = {
    index_codecs().add("raw", "4 bytes per position", {{&kRawLayout}}),
    index_codecs().add("auto", "whichever is smallest, message by message",
                       {{&kRawLayout, &kRun16Layout, &kRiceLayout, &kBitmapLayout, &kAllLayout}})};

}  // namespace

// u32 per position.
const IndexLayout kRawLayout{
    .id = 0,
    .expected_bytes = [](std::size_t count, std::size_t) { return 4.0 * static_cast<double>(count); },
    .size =
        [](std::span<const std::uint32_t> indices, std::size_t) {
          return IndexLayout::Size{indices.size_bytes(), 0};
        },
    .encode =
        [](std::span<const std::uint32_t> indices, std::size_t, std::vector<std::byte>& out, auto&) {
          const auto bytes = std::as_bytes(indices);
          out.insert(out.end(), bytes.begin(), bytes.end());
        },
    .decode =
        [](std::span<const std::byte> in, std::size_t, std::span<std::uint32_t> out, auto&) {
          if (in.size() < out.size_bytes()) damaged_block("positions are cut off");
          std::memcpy(out.data(), in.data(), out.size_bytes());
          return out.size_bytes();
        }};

// Nothing: every element is sent. Only compress.codec auto has it: the selection decides whether it fits.
const IndexLayout kAllLayout{
    .id = 4,
    .only_all = true,
    .expected_bytes = [](std::size_t, std::size_t) { return 0.0; },
    .size = [](std::span<const std::uint32_t>, std::size_t) { return IndexLayout::Size(); },
    .encode = [](std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>&,
                 auto&) { TOPKNOT_CHECK(indices.size() == numel, "not every element is sent"); },
    .decode =
        [](std::span<const std::byte>, std::size_t numel, std::span<std::uint32_t> out, auto&) {
          if (out.size() != numel)
            damaged_block(std::to_string(out.size()) + " entries without positions, of " +
                          std::to_string(numel));
          std::iota(out.begin(), out.end(), 0u);
          return std::size_t{0};
        }};

const IndexLayout& IndexCodec::choose(std::span<const std::uint32_t> indices, std::size_t numel,
                                      const ValueCodec& values) const {
  const std::size_t count = indices.size();
  const IndexLayout* best = layouts.front();
  if (count == 0 || layouts.size() == 1) return *best;
  std::size_t least = 0;
  for (const IndexLayout* layout : layouts) {
    if (!layout->fits(count, numel)) continue;
    const IndexLayout::Size size = layout->size(indices, numel);
    const std::size_t bytes = size.bytes + values.bytes(count + (values.fills ? size.fillers : 0));
    if (layout != layouts.front() && bytes >= least) continue;
    best = layout;
    least = bytes;
  }
  return *best;
}

double IndexCodec::expected_bytes(std::size_t count, std::size_t numel) const {
  double least = layouts.front()->expected_bytes(count, numel);
  // run16 is the smallest only for a handful of entries: what its fillers' values take is left aside.
  for (const IndexLayout* layout : layouts)
    if (layout != &kRun16Layout && layout->fits(count, numel))
      least = std::min(least, layout->expected_bytes(count, numel));
  return least;
}

std::size_t expected_block_bytes(const std::string& codec, const std::string& values, std::size_t count,
                                 std::size_t numel) {
  const auto positions = index_codecs().find(codec).expected_bytes(count, numel);
  return kBlockHeaderBytes + static_cast<std::size_t>(positions) + value_codecs().find(values).bytes(count);
}

std::vector<std::byte> write_block(const SparseVector& entries, std::size_t numel,
                                   const IndexCodec& index_codec, const ValueCodec& value_codec) {
  const std::size_t count = entries.indices.size();
  TOPKNOT_CHECK(count == entries.values.size() && count <= numel && numel < std::size_t{1} << 31,
                "entries that do not fit the group");
  const IndexLayout& layout = index_codec.choose(entries.indices, numel, value_codec);
  Header header;
  header.flags = entries.finite ? Header::kFiniteFlag : 0;
  header.index_codec = layout.id;
  header.value_codec = value_codec.id;
  header.numel = static_cast<std::uint32_t>(numel);
  header.count = static_cast<std::uint32_t>(count);
  std::vector<std::byte> block(sizeof header);
  std::memcpy(block.data(), &header, sizeof header);
  if (count == 0) return block;
  block.reserve(sizeof header + 4 * count + value_codec.bytes(count));
  std::vector<std::uint32_t> fillers;
  layout.encode(entries.indices, numel, block, fillers);
  if (!value_codec.fills) fillers.clear();
  if (fillers.empty())
    value_codec.encode(entries.values, block);
  else
    value_codec.encode(with_fillers(entries.values, fillers), block);
  return block;
}

void read_block(std::span<const std::byte> block, std::size_t numel, const IndexCodec& index_codec,
                const ValueCodec& value_codec, SparseVector& entries) {
  Header header;
  if (block.size() < sizeof header) damaged_block(std::to_string(block.size()) + " bytes are no header");
  std::memcpy(&header, block.data(), sizeof header);
  if (header.magic != Header::kMagic || header.version != Header::kVersion)
    damaged_block("not a block of this version");
  if (header.flags & ~Header::kFiniteFlag) damaged_block("unknown flags");
  const IndexLayout* const layout = index_codec.find(header.index_codec);
  if (layout == nullptr || header.value_codec != value_codec.id)
    damaged_block(
        "coded otherwise than here; do all ranks run with the same compress.codec and compress.values?");
  if (header.numel != numel)
    damaged_block("for " + std::to_string(header.numel) + " elements where the group has " +
                  std::to_string(numel));
  entries.finite = header.flags & Header::kFiniteFlag;
  if (header.count > numel || (!entries.finite && header.count > 0))
    damaged_block("count " + std::to_string(header.count) + " of " + std::to_string(numel));
  std::span<const std::byte> body = block.subspan(sizeof header);
  // The least that values take bounds what is allocated below.
  if ((value_codec.least ? value_codec.least : value_codec.bytes)(header.count) > body.size())
    damaged_block("shorter than its count");
  entries.indices.resize(header.count);
  std::vector<std::uint32_t> fillers;
  if (header.count > 0) body = body.subspan(layout->decode(body, numel, entries.indices, fillers));
  check_positions(entries.indices, numel);
  if (!value_codec.fills) fillers.clear();
  const std::size_t slots = header.count + fillers.size();
  if ((!value_codec.least || slots == 0) && value_codec.bytes(slots) != body.size())
    damaged_block(std::to_string(body.size()) + " bytes of values for " + std::to_string(slots) + " entries");
  entries.values.resize(slots);
  value_codec.decode(body, entries.values);
  if (largest_key(entries.values.data(), slots) > kLargestFinite) damaged_block("a value that is not finite");
  if (!fillers.empty()) drop_fillers(entries.values, fillers);
}

Registry<IndexCodec>& index_codecs() {
  static Registry<IndexCodec> registry("index codec (compress.codec)");
  return registry;
}

Registry<ValueCodec>& value_codecs() {
  static Registry<ValueCodec> registry("value codec (compress.values)");
  return registry;
}

}  // namespace topknot
