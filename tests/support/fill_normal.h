#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "nn/core/rng.h"

namespace topknot {

// Initialises a parameter with standard normal numbers.
inline void fill_normal(std::span<float> values, const CounterRng& rng) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = rng.normal(i);
}

// The gradient of a step.
inline std::vector<float> gradient_of_step(std::size_t size, std::uint32_t step) {
  std::vector<float> gradient(size);
  fill_normal(gradient, CounterRng(2, RngUse::test, step));
  return gradient;
}

}  // namespace topknot
