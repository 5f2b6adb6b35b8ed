#pragma once
// The GPU memory behind compress/select/cuda/gpu_select.h, of the current context.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_select.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {

// Which range each block of a grid serves, where range r has counts[r] blocks.
class BlockTable {
 public:
  BlockTable() = default;
  explicit BlockTable(const std::vector<std::size_t>& counts);
  const RangeBlocks& blocks() const { return blocks_; }

 private:
  DeviceArray<std::uint32_t> range_, first_;
  RangeBlocks blocks_;
};

// A group's ranges, with memory for what a selector takes of them in steps of these densities or less, one per range.
class SelectMemory {
 public:
  SelectMemory() = default;
  SelectMemory(const std::vector<DeviceRange>& ranges, const std::vector<double>& densities,
               const DeviceSelector& selector);
  const SelectRanges& ranges() const { return ranges_; }
  // Of all ranges, side by side in their order.
  std::size_t capacity() const { return taken_values_.size(); }
  std::uint32_t* taken_indices() const { return taken_indices_.data(); }
  float* taken_values() const { return taken_values_.data(); }

 private:
  DeviceArray<std::uint32_t> counts_, slot_indices_, indices_, taken_indices_, largest_;
  DeviceArray<float> slot_values_, values_, taken_values_;
  DeviceArray<ListStats> list_stats_;
  DeviceArray<SelectStats> stats_;
  DeviceArray<SelectRange> range_;
  DeviceArray<MagnitudeKey> above_;
  DeviceArray<Choice> choices_;
  BlockTable tiles_, shares_;
  SelectRanges ranges_;
};

// The capacity of methods that bound nothing themselves: compress.capacity (`multiple`, 0: none) times k, or
// everything.
inline std::size_t capacity_within(double multiple, std::size_t k, std::size_t n) {
  const double most = multiple * static_cast<double>(k);
  return multiple == 0 || most >= static_cast<double>(n) ? n : static_cast<std::size_t>(most);
}

}  // namespace topknot::cuda
