#pragma once
// First values of parameters.

#include <cmath>

#include "nn/core/parameter.h"
#include "nn/core/rng.h"

namespace topknot {

inline Initializer constant(float value) {
  return
      [value](std::span<float> values, const CounterRng&) { std::fill(values.begin(), values.end(), value); };
}

// Normal with std = sqrt(2 / fan_in) (He et al., ICCV 2015).
inline Initializer kaiming_normal(std::int64_t fan_in) {
  const float std = std::sqrt(2.0f / static_cast<float>(fan_in));
  return [std](std::span<float> values, const CounterRng& rng) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = std * rng.normal(i);
  };
}

// Uniform in [-bound, bound).
inline Initializer uniform(float bound) {
  return [bound](std::span<float> values, const CounterRng& rng) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = bound * (2.0f * rng.uniform(i) - 1.0f);
  };
}

}  // namespace topknot
