// Sparse blocks in every pair of index codec and value codec.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "compress/codec/codec.h"
#include "nn/base/check.h"
#include "tests/fuzz/fuzz_target.h"

namespace topknot::fuzz {
namespace {

std::vector<std::uint32_t> some_positions(std::size_t numel, Random& random) {
  std::vector<std::uint32_t> positions;
  // The largest gap: 1 takes all; numel few.
  std::size_t gap = 1;
  switch (random.below(6)) {
    case 0:
      break;
    case 1:
      gap = 2;
      break;
    case 2:
      gap = 1 + random.below(20);
      break;
    case 3:
      return positions;
    default:
      gap = numel;
      break;
  }
  gap = std::max(gap, numel / 4000);
  std::size_t at = gap == 1 ? 0 : random.below(gap);
  while (at < numel) {
    positions.push_back(std::uint32_t(at));
    // Runs of neighbours among the gaps.
    at += gap > 1 && random.one_in(2) ? 1 + random.below(gap) : 1;
    if (gap == numel && random.one_in(16)) break;
  }
  return positions;
}

float some_value(Random& random) {
  const std::uint64_t bits = random.bits();
  switch (bits & 7) {
    case 0:
      return 0.0f;
    case 1: {
      const float any = std::bit_cast<float>(std::uint32_t(bits >> 32));
      return std::isfinite(any) ? any : 3.4028235e38f;
    }
    default:
      return (float(bits >> 40) - 0x1p23f) * 0x1p-30f;
  }
}

class SparseBlocks {
 public:
  SparseBlocks(const std::string& index, const std::string& value)
      : index_(&index_codecs().find(index)), value_(&value_codecs().find(value)) {}

  Sample make(Random& random) const {
    Sample sample;
    sample.numel = random.below(random.one_in(256) ? 400000 : random.one_in(64) ? 5000 : 120);
    SparseVector entries;
    entries.finite = !random.one_in(64);
    if (entries.finite) entries.indices = some_positions(sample.numel, random);
    entries.values.resize(entries.indices.size());
    for (float& value : entries.values) value = some_value(random);
    sample.block = write_block(entries, sample.numel, *index_, *value_);
    return sample;
  }

  bool accept(std::span<const std::byte> block, std::size_t numel) {
    try {
      read_block(block, numel, *index_, *value_, entries_);
    } catch (const Error&) {
      require(entries_.indices.capacity() <= most_bytes(block), "memory for more than the block can hold");
      return false;
    }
    require(entries_.indices.size() == entries_.values.size(), "as many values as positions");
    require(entries_.finite || entries_.indices.empty(), "entries of a step that is not finite");
    std::uint64_t next = 0;
    for (const std::uint32_t index : entries_.indices) {
      require(index >= next && index < numel, "ascending positions in range");
      next = std::uint64_t{index} + 1;
    }
    for (const float value : entries_.values) require(std::isfinite(value), "finite values");
    // In its own layout, an accepted block is the one that these entries are written as.
    const IndexLayout* layout = index_->find(std::to_integer<std::uint8_t>(block[6]));
    require(layout != nullptr, "a layout that the reader knows");
    const Block again = write_block(entries_, numel, IndexCodec{{layout}}, *value_);
    require(std::equal(again.begin(), again.end(), block.begin(), block.end()),
            "the bytes that a writer makes");
    most_bytes(block);
    return true;
  }

 private:
  // The longest block so far: entries_ keeps its memory.
  std::size_t most_bytes(std::span<const std::byte> block) {
    longest_ = std::max({longest_, block.size(), std::size_t{64}});
    const std::size_t values_in_a_byte = value_->least ? 8192 : value_->bytes(4096) < 4096 ? 8 : 1;
    return 2 * values_in_a_byte * longest_;
  }

  const IndexCodec* index_;
  const ValueCodec* value_;
  SparseVector entries_;
  std::size_t longest_ = 0;
};

// Made at the first use: before main the codes may not be registered yet.
struct LazyBlocks {
  std::string index, value;
  std::unique_ptr<SparseBlocks> blocks;
  SparseBlocks& get() {
    if (!blocks) blocks = std::make_unique<SparseBlocks>(index, value);
    return *blocks;
  }
};

const bool added = [] {
  // The reader of auto takes every layout, `all` among them.
  for (const char* index : {"raw", "run16", "rice", "bitmap", "ans", "auto"})
    for (const char* value :
         {"fp32", "bf16", "fp16", "int8", "fp8", "centroid2", "centroid1", "e3m0", "centroid2_ans"}) {
      const auto lazy = std::make_shared<LazyBlocks>(LazyBlocks{index, value, nullptr});
      fuzz_targets().add(lazy->index + "/" + lazy->value, "sparse block",
                         {[lazy](Random& random) { return lazy->get().make(random); },
                          [lazy](std::span<const std::byte> block, std::size_t numel) {
                            return lazy->get().accept(block, numel);
                          }});
    }
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz
