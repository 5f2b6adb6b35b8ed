#pragma once
// Connectionist temporal classification by its definition: the sum over every alignment, one by one, in
// double.

#include "tests/support/variables.h"

namespace topknot::testing {

struct CtcCase {
  std::string name;
  std::int64_t frames, classes, longest;
  std::int32_t blank;
  std::vector<std::int32_t> labels, lengths, frame_counts;

  std::int64_t sequences() const { return static_cast<std::int64_t>(lengths.size()); }
  CtcTargets targets() const { return {labels, lengths, frame_counts}; }
  std::vector<float> logits() const { return random_values(frames * sequences() * classes, 5); }

  // The mean of -log p over the sequences, where p sums the products of all paths that collapse to the
  // labels: neighbours that are equal become one, then blanks go.
  double loss(const Array& z) const {
    double total = 0;
    for (std::int64_t n = 0; n < sequences(); ++n) total -= std::log(probability(z, n));
    return total / static_cast<double>(sequences());
  }
  // By central differences.
  Array gradient(const Array& z) const {
    Array d(z.size());
    constexpr double h = 1e-5;
    for (std::size_t i = 0; i < z.size(); ++i) {
      Array up = z, down = z;
      up[i] += h, down[i] -= h;
      d[i] = (loss(up) - loss(down)) / (2 * h);
    }
    return d;
  }

 private:
  double probability(const Array& z, std::int64_t n) const {
    const auto i = static_cast<std::size_t>(n);
    const std::vector<std::int32_t> wanted(labels.begin() + n * longest,
                                           labels.begin() + n * longest + lengths[i]);
    std::vector<std::int32_t> path(frame_counts[i]);
    double sum = 0;
    while (true) {
      std::vector<std::int32_t> collapsed;
      double p = 1;
      for (std::size_t t = 0; t < path.size(); ++t) {
        if (path[t] != blank && (t == 0 || path[t] != path[t - 1])) collapsed.push_back(path[t]);
        const auto row = (t * static_cast<std::size_t>(sequences()) + i) * static_cast<std::size_t>(classes);
        double all = 0;
        for (std::size_t c = 0; c < static_cast<std::size_t>(classes); ++c) all += std::exp(z[row + c]);
        p *= std::exp(z[row + static_cast<std::size_t>(path[t])]) / all;
      }
      if (collapsed == wanted) sum += p;
      std::size_t t = 0;
      while (t < path.size() && ++path[t] == classes) path[t++] = 0;
      if (t == path.size()) return sum;
    }
  }
};

inline std::vector<CtcCase> ctc_cases() {
  return {{"one frame, one label", 1, 3, 1, 0, {2}, {1}, {1}},
          {"no label", 3, 2, 1, 0, {0}, {0}, {3}},
          {"no labels at all", 2, 2, 0, 1, {}, {0, 0}, {2, 1}},
          {"equal neighbours take a blank between them", 5, 3, 3, 0, {1, 1, 2}, {3}, {5}},
          {"just enough frames", 3, 3, 2, 0, {2, 2}, {2}, {3}},
          {"a blank in the middle of the classes", 5, 4, 2, 2, {3, 1}, {2}, {5}},
          {"sequences of several lengths", 6, 4, 3, 3, {0, 1, 0, 2, 2, 0, 1, 0, 0}, {3, 2, 1}, {6, 4, 2}}};
}

}  // namespace topknot::testing
