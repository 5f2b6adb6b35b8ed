#pragma once
// Vectors and the plain definitions that selections are compared with.

#include "nn/core/rng.h"
#include "tests/support/same_bits.h"
#include "tests/support/test.h"
#include "tests/support/threads.h"

namespace topknot::testing {

// The selector fixture of length 10007: u_i = ((i * 7919) mod 10007) / 10007 - 0.5, then a power of it.
inline std::vector<float> fixture(const std::string& name) {
  std::vector<float> x(10007);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double u = double((i * 7919) % 10007) / 10007.0 - 0.5;
    const double cube = u * u * u;
    x[i] = float(name == "p9" ? 512 * cube * cube * cube : name == "shift" ? 8 * cube + 0.5 : 8 * cube);
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

// Bell-shaped with heavier tails for larger `power`; power 1 is a normal distribution.
inline std::vector<float> noise(std::size_t n, std::uint32_t stream, double power = 1) {
  const CounterRng rng(29, RngUse::test, stream);
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) {
    const double z = rng.normal(i);
    x[i] = float(std::copysign(std::pow(std::abs(z), power), z));
  }
  return x;
}

inline std::vector<float> normal_values(std::size_t n, double scale, std::uint32_t seed) {
  const CounterRng rng(seed, RngUse::test);
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = float(scale * rng.normal(i));
  return values;
}

// The positions whose magnitude exceeds t: the definition.
inline std::vector<std::uint32_t> positions_above(const std::vector<float>& x, double t) {
  std::vector<std::uint32_t> positions;
  for (std::size_t i = 0; i < x.size(); ++i)
    if (std::abs(double(x[i])) > t) positions.push_back(std::uint32_t(i));
  return positions;
}

inline std::uint64_t index_sum(const std::vector<std::uint32_t>& indices) {
  return std::accumulate(indices.begin(), indices.end(), std::uint64_t{0});
}

}  // namespace topknot::testing
