#pragma once
// Vectors and the plain definitions that selections are compared with.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace topknot::testing {

// The selector fixture of length 10007: u_i = ((i * 7919) mod 10007) / 10007 - 0.5, then a power of it.
inline std::vector<float> fixture(const std::string& name) {
  std::vector<float> x(10007);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double u = static_cast<double>((i * 7919) % 10007) / 10007.0 - 0.5;
    const double cube = u * u * u;
    x[i] = static_cast<float>(name == "p9"      ? 512 * cube * cube * cube
                              : name == "shift" ? 8 * cube + 0.5
                                                : 8 * cube);
  }
  return x;
}

// The k largest magnitudes, ties to the lower index: the definition, by sorting.
inline std::vector<std::uint32_t> plain_topk(const std::vector<float>& x, std::size_t k) {
  std::vector<std::uint32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return std::abs(x[a]) > std::abs(x[b]); });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

inline std::uint64_t index_sum(const std::vector<std::uint32_t>& indices) {
  return std::accumulate(indices.begin(), indices.end(), std::uint64_t{0});
}

}  // namespace topknot::testing
