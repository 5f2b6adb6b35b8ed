#pragma once
// The GPU memory behind compress/select/cuda/gpu_select.h, of the current context.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_select.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {

// Of a pass over n elements that lists up to `limit` entries.
class ListMemory {
 public:
  ListMemory() = default;
  ListMemory(std::size_t n, std::size_t limit) {
    limit = std::clamp<std::size_t>(limit, 1, n);
    const std::size_t tiles = (n + kSelectTile - 1) / kSelectTile;
    // As many slots as the list's share of a tile; uneven lists read their full tiles again.
    const std::size_t slots = std::clamp<std::size_t>(std::bit_ceil((limit + tiles - 1) / tiles), 32, 1024);
    counts_ = DeviceArray<std::uint32_t>(2 * tiles);
    slot_indices_ = DeviceArray<std::uint32_t>(tiles * slots);
    slot_values_ = DeviceArray<float>(tiles * slots);
    indices_ = DeviceArray<std::uint32_t>(limit);
    values_ = DeviceArray<float>(limit);
    stats_ = DeviceArray<ListStats>(1);
    tiles_ = {counts_.data(), counts_.data() + tiles, slot_indices_.data(), slot_values_.data(),
              static_cast<std::uint32_t>(slots)};
    list_ = {indices_.data(), values_.data(), static_cast<std::uint32_t>(limit), stats_.data()};
  }
  const TileMemory& tiles() const { return tiles_; }
  const EntryList& list() const { return list_; }

 private:
  DeviceArray<std::uint32_t> counts_, slot_indices_, indices_;
  DeviceArray<float> slot_values_, values_;
  DeviceArray<ListStats> stats_;
  TileMemory tiles_;
  EntryList list_;
};

class LargestScratch {
 public:
  LargestScratch() : parameters_(kDigitCounts + 2 * kSelectBlocks + kRadixWords) {
    TOPKNOT_CUDA(cudaMemsetAsync(parameters_.data(), 0, parameters_.bytes(), Context::current().stream()));
  }
  LargestMemory memory() const {
    std::uint32_t* at = parameters_.data();
    return {at, at + kDigitCounts, at + kDigitCounts + 2 * kSelectBlocks};
  }

 private:
  DeviceArray<std::uint32_t> parameters_;
};

inline StatsOut stats_of(const DeviceSelected& selected) {
  DeviceSelected::Stats* stats = selected.stats;
  return {&stats->count, &stats->finite, &stats->over, &stats->threshold};
}
inline Taken taken_of(const DeviceSelected& selected) {
  return {selected.indices, selected.values, selected.capacity, &selected.stats->threshold};
}
// The capacity of methods that bound nothing themselves: compress.capacity (`multiple`, 0: none) times k, or
// everything.
inline std::size_t capacity_within(double multiple, std::size_t k, std::size_t n) {
  const double most = multiple * static_cast<double>(k);
  return multiple == 0 || most >= static_cast<double>(n) ? n : static_cast<std::size_t>(most);
}

}  // namespace topknot::cuda
