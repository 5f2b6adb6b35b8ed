#pragma once
// A vector that is a group's only range, with room for what is selected of it.

#include <vector>

#include "compress/select/cuda/gpu_select_memory.h"
#include "tests/cuda/device_vector.h"

namespace topknot::test {

struct OneRange {
  OneRange(std::size_t n, std::size_t limit, std::size_t room)
      : indices(std::vector<std::uint32_t>(room, 77)),
        values(std::vector<float>(room, -7)),
        stats(std::vector<cuda::DeviceSelected::Stats>(1)) {
    const double density = 1;
    const cuda::DeviceSelected selected{indices.data(), values.data(), static_cast<std::uint32_t>(room),
                                        stats.data()};
    memory = cuda::SelectMemory({{0, n}}, std::span(&density, 1), std::span(&selected, 1),
                                [limit](std::size_t, double) { return limit; });
    range = to_host(ranges().range, 1)[0];
  }
  const cuda::SelectRanges& ranges() const { return memory.ranges(); }

  DeviceVector<std::uint32_t> indices;
  DeviceVector<float> values;
  DeviceVector<cuda::DeviceSelected::Stats> stats;
  cuda::SelectMemory memory;
  cuda::SelectRange range;
};

}  // namespace topknot::test
