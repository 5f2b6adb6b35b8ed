#pragma once
// What the tests over all registered methods share: options with which each runs, gradients whose counts
// differ by rank, and the vectors at the edge.

#include "tests/compress/simulated_ranks.h"

namespace topknot::testing {

// Methods of this program's tests register too; theirs begin with test_.
inline std::vector<std::string> methods() {
  std::vector<std::string> names;
  for (const std::string& name : compressors().names())
    if (name.rfind("test_", 0) != 0) names.push_back(name);
  return names;
}

inline CompressOptions options_for(const std::string& name, const std::vector<std::string>& keys = {}) {
  return with(named(name, {"seed=7", "momentum=0.9", "threshold=0.5", "min_compression=1.0"}), keys);
}

// Heavier tails on higher ranks: a threshold rule selects another count on each.
inline std::vector<float> gradient_of(std::int64_t step, std::size_t rank, std::size_t n) {
  const CounterRng rng(11, RngUse::test, std::uint32_t(step), std::uint32_t(rank));
  std::vector<float> g(n);
  for (std::size_t i = 0; i < n; ++i) {
    const float x = rng.normal(i);
    g[i] = x * std::pow(std::abs(x) + 0.1f, float(rank));
  }
  return g;
}

struct EdgeVector {
  std::string what;
  std::vector<float> values;
  bool finite = true;
};

inline std::vector<EdgeVector> edge_vectors(std::size_t n) {
  constexpr float tiny = std::numeric_limits<float>::denorm_min();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const auto constant = [n](float value) { return std::vector<float>(n, value); };
  const auto one_is = [n](float value) {
    std::vector<float> g = gradient_of(1, 0, n);
    g[n / 2] = value;
    return g;
  };
  std::vector<float> denormals(n), signs(n), single(n);
  for (std::size_t i = 0; i < n; ++i) {
    denormals[i] = tiny * float(i % 7) * (i % 2 ? 1.0f : -1.0f);
    signs[i] = i % 3 ? 2.0f : -2.0f;
  }
  single[n - 1] = -3.0f;
  return {{"zeros", constant(0)},           {"all equal", constant(0.25f)},
          {"one magnitude", signs},         {"denormals", denormals},
          {"a single entry", single},       {"NaN", one_is(nan), false},
          {"infinity", one_is(inf), false}, {"minus infinity", one_is(-inf), false}};
}

}  // namespace topknot::testing
