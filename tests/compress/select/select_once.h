#pragma once
// One selection by a selector on its own, and the vectors that selectors are tried on.

#include <cmath>
#include <string>
#include <vector>

#include "compress/select/selector.h"
#include "nn/core/rng.h"

namespace topknot::testing {

struct Asked {
  double density = 0.01;
  std::int64_t step = 0;
  int rank = 0;
  std::size_t position = 0;
  std::size_t (*target)(double density, std::size_t d) = target_count;  // SelectorTraits::target
};

// u becomes u + addend.
inline Selection select_once(Selector& selector, std::vector<float>& u, const std::vector<float>& addend,
                             const Asked& asked) {
  Selection selected;
  SelectStep step;
  step.density = asked.density;
  step.k = asked.target(asked.density, u.size());
  step.step = asked.step;
  step.rank = asked.rank;
  step.position = asked.position;
  selector.select(u, addend, step, selected);
  return selected;
}
inline Selection select_from_copy(Selector& selector, std::vector<float> u, const Asked& asked) {
  return select_once(selector, u, {}, asked);
}

// Bell-shaped with heavier tails for larger `power`; power 1 is a normal distribution.
inline std::vector<float> noise(std::size_t n, std::uint32_t stream, double power = 1) {
  const CounterRng rng(29, RngUse::test, stream);
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) {
    const double z = rng.normal(i);
    x[i] = static_cast<float>(std::copysign(std::pow(std::abs(z), power), z));
  }
  return x;
}

// The positions whose magnitude exceeds t: the definition.
inline std::vector<std::uint32_t> positions_above(const std::vector<float>& x, double t) {
  std::vector<std::uint32_t> positions;
  for (std::size_t i = 0; i < x.size(); ++i)
    if (std::abs(static_cast<double>(x[i])) > t) positions.push_back(static_cast<std::uint32_t>(i));
  return positions;
}

// Ascending positions of x, each with its value.
inline bool well_formed(const Selection& selected, const std::vector<float>& x) {
  if (selected.indices.size() != selected.values.size()) return false;
  for (std::size_t i = 0; i < selected.indices.size(); ++i) {
    if (selected.indices[i] >= x.size() || (i > 0 && selected.indices[i] <= selected.indices[i - 1]))
      return false;
    if (selected.values[i] != x[selected.indices[i]]) return false;
  }
  return true;
}

}  // namespace topknot::testing
