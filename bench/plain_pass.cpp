#include "bench/plain_pass.h"

#include <algorithm>

#include "compress/parallel.h"
#include "nn/core/base/check.h"
#include "nn/core/simd.h"

namespace topknot::bench {

TOPKNOT_MULTIVERSION void add(float* r, const float* g, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) r[i] += g[i];
}

void plain_pass(std::span<float> r, std::span<const float> g) {
  for_parts(r.size(), part_count(r.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
    add(r.data() + begin, g.data() + begin, end - begin);
  });
}

double median(std::vector<double> values) {
  TOPKNOT_CHECK(!values.empty(), "no step was measured");
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

}  // namespace topknot::bench
