#include "compress/select/cuda/gpu_select_memory.h"

#include <algorithm>
#include <bit>

#include "nn/base/check.h"

namespace topknot::cuda {

BlockTable::BlockTable(const std::vector<std::size_t>& counts) {
  std::vector<std::uint32_t> range, first{0};
  for (std::size_t r = 0; r < counts.size(); ++r) {
    range.insert(range.end(), counts[r], static_cast<std::uint32_t>(r));
    first.push_back(static_cast<std::uint32_t>(range.size()));
  }
  blocks_.count = first.back();
  if (counts.size() <= 1) return;
  range_ = on_device(range);
  first_ = on_device(first);
  blocks_.range = range_.data();
  blocks_.first = first_.data();
}

SelectMemory::SelectMemory(const std::vector<DeviceRange>& ranges, const std::vector<double>& densities,
                           const DeviceSelector& selector) {
  TOPKNOT_CHECK(densities.size() == ranges.size(), "a density per range");
  const auto parts = [](std::size_t n, std::size_t each) { return (n + each - 1) / each; };
  std::size_t elements = 0;
  for (const DeviceRange& range : ranges) elements += range.n;
  // Where each range's memory begins in the group's; then the whole.
  struct Place {
    std::size_t tiles = 0, slots = 0, entries = 0, taken = 0, largest = 0;
  } end;
  std::vector<Place> places;
  std::vector<SelectRange> table;
  std::vector<std::size_t> tiles, shares;
  for (std::size_t r = 0; r < ranges.size(); ++r) {
    const std::size_t n = ranges[r].n;
    const std::size_t most = std::clamp<std::size_t>(selector.list_limit(n, densities[r]), 1, n);
    tiles.push_back(parts(n, kSelectTile));
    // Blocks by the ranges' lengths, so that a group of many ranges has no more of them than the GPU keeps busy.
    shares.push_back(std::clamp<std::size_t>(parts(n, kLeastShare), 1,
                                             std::max<std::size_t>(1, kSelectBlocks * n / elements)));
    SelectRange range;
    range.begin = ranges[r].begin;
    range.n = n;
    range.position = ranges[r].position;
    range.least_density = ranges[r].least_density;
    range.taken.capacity = static_cast<std::uint32_t>(selector.capacity(n, densities[r]));
    range.slot = end.taken;
    range.list.limit = static_cast<std::uint32_t>(most);
    // As many slots as the list's share of a tile; uneven lists read their full tiles again.
    range.tiles.slots = static_cast<std::uint32_t>(
        std::clamp<std::size_t>(std::bit_ceil(parts(most, tiles.back())), 32, 1024));
    table.push_back(range);
    places.push_back(end);
    end.tiles += tiles.back();
    end.slots += tiles.back() * range.tiles.slots;
    end.entries += most;
    end.taken += range.taken.capacity;
    end.largest += kDigitCounts + 2 * shares.back() + kRadixWords;
  }
  counts_ = DeviceArray<std::uint32_t>(2 * end.tiles);
  slot_indices_ = DeviceArray<std::uint32_t>(end.slots);
  slot_values_ = DeviceArray<float>(end.slots);
  indices_ = DeviceArray<std::uint32_t>(end.entries);
  values_ = DeviceArray<float>(end.entries);
  taken_indices_ = DeviceArray<std::uint32_t>(end.taken);
  taken_values_ = DeviceArray<float>(end.taken);
  list_stats_ = DeviceArray<ListStats>(ranges.size());
  stats_ = DeviceArray<SelectStats>(ranges.size());
  largest_ = DeviceArray<std::uint32_t>(end.largest);
  TOPKNOT_CUDA(cudaMemsetAsync(largest_.data(), 0, largest_.bytes(), Context::current().stream()));
  for (std::size_t r = 0; r < ranges.size(); ++r) {
    SelectRange& range = table[r];
    const Place& at = places[r];
    range.tiles.counts = counts_.data() + at.tiles;
    range.tiles.offsets = counts_.data() + end.tiles + at.tiles;
    range.tiles.indices = slot_indices_.data() + at.slots;
    range.tiles.values = slot_values_.data() + at.slots;
    range.list.indices = indices_.data() + at.entries;
    range.list.values = values_.data() + at.entries;
    range.list.stats = list_stats_.data() + r;
    range.taken.indices = taken_indices_.data() + at.taken;
    range.taken.values = taken_values_.data() + at.taken;
    range.stats = stats_.data() + r;
    range.largest.digits = largest_.data() + at.largest;
    range.largest.blocks = range.largest.digits + kDigitCounts;
    range.largest.radix = range.largest.blocks + 2 * shares[r];
  }
  range_ = on_device(table);
  above_ = on_device(std::vector<MagnitudeKey>(ranges.size(), kLargestFinite));
  choices_ = DeviceArray<Choice>(ranges.size());
  tiles_ = BlockTable(tiles);
  shares_ = BlockTable(shares);
  ranges_.range = range_.data();
  ranges_.count = static_cast<std::uint32_t>(ranges.size());
  ranges_.tiles = tiles_.blocks();
  ranges_.shares = shares_.blocks();
  ranges_.above = above_.data();
  ranges_.choices = choices_.data();
}

}  // namespace topknot::cuda
