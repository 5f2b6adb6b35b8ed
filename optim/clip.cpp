#include "optim/clip.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "nn/core/base/check.h"
#include "nn/core/base/text.h"
#include "nn/core/simd.h"
#include "optim/clip_rule.h"

namespace topknot {
namespace {

constexpr std::size_t kBlock = kClipBlock;
static_assert(kClipLanes == kLanes);
constexpr std::size_t kParallelNorm = 1 << 16;  // elements

// Sixteen running sums, so that the compiler may use vectors without reordering anything.
TOPKNOT_MULTIVERSION double block_sum_of_squares(const float* values, std::size_t n) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  for (std::size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += static_cast<double>(values[i]) * values[i];
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void check_clip_norm(double max_norm) {
  if (!(max_norm > 0))
    throw UserError("a clipping norm must be greater than 0, not " + short_text(max_norm) +
                    "; leave the key out to clip nothing");
}

double sum_of_squares(std::span<const float> values) {
  const std::int64_t blocks = static_cast<std::int64_t>((values.size() + kBlock - 1) / kBlock);
  std::vector<double> sums(static_cast<std::size_t>(blocks));
#pragma omp parallel for schedule(static) if (values.size() >= kParallelNorm)
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::size_t begin = static_cast<std::size_t>(block) * kBlock;
    sums[static_cast<std::size_t>(block)] =
        block_sum_of_squares(values.data() + begin, std::min(kBlock, values.size() - begin));
  }
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

double l2_norm(std::span<const float> values) {
  return std::sqrt(sum_of_squares(values));
}

double clip_factor(double norm, double max_norm) {
  check_clip_norm(max_norm);
  return clip_factor_of(norm, max_norm);
}

void scale(std::span<float> values, double factor) {
  if (factor == 1.0) return;
  const std::int64_t blocks = static_cast<std::int64_t>((values.size() + kBlock - 1) / kBlock);
#pragma omp parallel for schedule(static) if (values.size() >= kParallelNorm)
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::size_t begin = static_cast<std::size_t>(block) * kBlock;
    multiply(values.data() + begin, std::min(kBlock, values.size() - begin), static_cast<float>(factor));
  }
}

}  // namespace topknot
