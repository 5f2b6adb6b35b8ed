#pragma once
// The numbers of golden cases: made without a library's functions, so the same bits everywhere.

#include <cstdint>
#include <vector>

namespace topknot::testing {

inline std::vector<double> generated(std::size_t n, std::int64_t seed) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(n); ++i) {
    const std::int64_t k = (i * (7919 + 613 * seed) + 104729 * seed + 1) % 10007;
    const double u = (static_cast<double>(k) - 5003.3) / 10007.0;
    values.push_back(8.0 * u * u * u * (1.0 + 0.1 * static_cast<double>(i % 7)));
  }
  return values;
}

}  // namespace topknot::testing
