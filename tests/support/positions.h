#pragma once
// Positions drawn uniformly.

#include <cstdint>
#include <vector>

namespace topknot::testing {

// Exactly `count` of `numel` positions, ascending, every set alike likely (selection sampling).
inline std::vector<std::uint32_t> uniform_positions(std::size_t numel, std::size_t count,
                                                    std::uint64_t seed) {
  std::vector<std::uint32_t> positions;
  positions.reserve(count);
  std::uint64_t state = seed;
  for (std::size_t i = 0; i < numel && positions.size() < count; ++i) {
    state += 0x9E3779B97F4A7C15u;  // SplitMix64
    std::uint64_t z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    const std::uint64_t left = numel - i, wanted = count - positions.size();
    if ((z >> 32) * left >> 32 < wanted) positions.push_back(static_cast<std::uint32_t>(i));
  }
  return positions;
}

}  // namespace topknot::testing
