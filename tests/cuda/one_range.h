#pragma once
// A vector that is a group's only range, with room for what is selected of it.

#include <vector>

#include "compress/select/cuda/device_selector.h"
#include "tests/cuda/device_vector.h"

namespace topknot::testing {

struct OneRange {
  OneRange(std::size_t n, std::size_t limit, std::size_t room) : OneRange(n, 1.0, Rooms(limit, room)) {}
  // What the selector asks for.
  OneRange(std::size_t n, double density, const cuda::DeviceSelector& selector)
      : memory({{0, n}}, {density}, selector), range(to_host(ranges().range, 1)[0]) {
    to_device(range.taken.indices, std::vector<std::uint32_t>(range.taken.capacity, 77));
    to_device(range.taken.values, std::vector<float>(range.taken.capacity, -7));
  }
  const cuda::SelectRanges& ranges() const { return memory.ranges(); }
  std::vector<std::uint32_t> indices() const { return to_host(range.taken.indices, range.taken.capacity); }
  std::vector<float> values() const { return to_host(range.taken.values, range.taken.capacity); }
  cuda::SelectStats stats() const { return to_host(range.stats, 1)[0]; }

  // Asks for memory, and selects nothing.
  struct Rooms final : cuda::DeviceSelector {
    Rooms(std::size_t of_list, std::size_t taken) : limit(of_list), room(taken) {}
    std::size_t capacity(std::size_t, double) const override { return room; }
    std::size_t list_limit(std::size_t, double) const override { return limit; }
    void select(cudaStream_t, const cuda::SelectRanges&, const cuda::Accumulate&,
                const StepParameters*) override {}
    std::size_t limit, room;
  };

  cuda::SelectMemory memory;
  cuda::SelectRange range;
};

}  // namespace topknot::testing
