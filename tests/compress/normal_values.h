#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nn/core/rng.h"

namespace topknot {

inline std::vector<float> normal_values(std::size_t n, double scale, std::uint32_t seed) {
  const CounterRng rng(seed, RngUse::test);
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<float>(scale * rng.normal(i));
  return values;
}

}  // namespace topknot
