#pragma once

#include <cstddef>
#include <span>

#include "nn/core/rng.h"

namespace topknot {

// Initialises a parameter with standard normal numbers.
inline void fill_normal(std::span<float> values, const CounterRng& rng) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = rng.normal(i);
}

}  // namespace topknot
