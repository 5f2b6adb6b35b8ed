#include <algorithm>
#include <cstring>
#include <string>

#include "compress/code/code.h"
#include "compress/select/keys.h"
#include "nn/core/check.h"

namespace topknot {
namespace {

constexpr std::uint32_t kMagic = 0x544B4E54;
constexpr std::uint8_t kVersion = 1, kFiniteFlag = 1;

struct Header {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion, flags = 0, index_code = 0, value_code = 0;
  std::uint32_t numel = 0, count = 0;
};
static_assert(sizeof(Header) == kBlockHeaderBytes && std::endian::native == std::endian::little);

[[noreturn]] void damaged(const std::string& what) {
  throw Error("damaged gradient block: " + what);
}

void check_positions(std::span<const std::uint32_t> indices, std::size_t numel) {
  std::int64_t last = -1;
  bool ascending = true;
  for (const std::uint32_t index : indices) {
    ascending &= static_cast<std::int64_t>(index) > last;
    last = index;
  }
  if (!ascending) damaged("positions do not ascend");
  if (last >= static_cast<std::int64_t>(numel))
    damaged("position " + std::to_string(last) + " of " + std::to_string(numel));
}

}  // namespace

std::vector<std::byte> write_block(const Entries<float>& entries, std::size_t numel,
                                   const IndexCode& index_code, const ValueCode& value_code) {
  TOPKNOT_CHECK(entries.indices.size() == entries.values.size() && entries.indices.size() <= numel,
                "entries that do not fit the group");
  Header header;
  header.flags = entries.finite ? kFiniteFlag : 0;
  header.index_code = index_code.id();
  header.value_code = value_code.id();
  header.numel = static_cast<std::uint32_t>(numel);
  header.count = static_cast<std::uint32_t>(entries.indices.size());
  std::vector<std::byte> block;
  block.reserve(sizeof header + 8 * entries.indices.size());
  block.resize(sizeof header);
  std::memcpy(block.data(), &header, sizeof header);
  index_code.encode(entries.indices, numel, block);
  value_code.encode(entries.values, block);
  return block;
}

void read_block(std::span<const std::byte> block, std::size_t numel, const IndexCode& index_code,
                const ValueCode& value_code, Entries<float>& entries) {
  Header header;
  if (block.size() < sizeof header) damaged(std::to_string(block.size()) + " bytes are no header");
  std::memcpy(&header, block.data(), sizeof header);
  if (header.magic != kMagic || header.version != kVersion) damaged("not a block of this version");
  if (header.flags & ~kFiniteFlag) damaged("unknown flags");
  if (header.index_code != index_code.id() || header.value_code != value_code.id())
    damaged("coded otherwise than here; do all ranks run with the same compress.code and compress.values?");
  if (header.numel != numel)
    damaged("for " + std::to_string(header.numel) + " elements where the group has " + std::to_string(numel));
  entries.finite = header.flags & kFiniteFlag;
  if (header.count > numel || (!entries.finite && header.count > 0))
    damaged("count " + std::to_string(header.count) + " of " + std::to_string(numel));
  const std::span<const std::byte> body = block.subspan(sizeof header);
  if (index_code.least_bytes(header.count) > body.size()) damaged("shorter than its count");
  entries.indices.resize(header.count);
  entries.values.resize(header.count);
  const std::size_t used = index_code.decode(body, numel, entries.indices);
  if (used > body.size()) damaged("shorter than its count");
  check_positions(entries.indices, numel);
  value_code.decode(body.subspan(used), entries.values);
  Key<float> largest = 0;
  for (const float value : entries.values) largest = std::max(largest, key_of(value));
  if (largest > largest_finite_key<float>()) damaged("a value that is not finite");
}

Registry<IndexCodeFactory>& index_codes() {
  static Registry<IndexCodeFactory> registry("index code (compress.code)");
  return registry;
}

Registry<ValueCodeFactory>& value_codes() {
  static Registry<ValueCodeFactory> registry("value code (compress.values)");
  return registry;
}

}  // namespace topknot
