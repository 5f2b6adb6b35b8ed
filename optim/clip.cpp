#include "optim/clip.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/device.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

constexpr std::size_t kBlock = kClipBlock;
static_assert(kClipLanes == kLanes);
constexpr std::size_t kParallelNorm = 1 << 16;  // elements

std::size_t blocks_of(std::size_t n) {
  return (n + kBlock - 1) / kBlock;
}

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

void clip_sum_of_squares(const float* values, std::size_t n, double* blocks, double* sum, bool add) {
  const std::int64_t count = static_cast<std::int64_t>(blocks_of(n));
#pragma omp parallel for schedule(static) if (n >= kParallelNorm)
  for (std::int64_t block = 0; block < count; ++block) {
    const std::size_t begin = static_cast<std::size_t>(block) * kBlock;
    blocks[block] = block_sum_of_squares(values + begin, std::min(kBlock, n - begin));
  }
  double total = 0;
  for (std::int64_t block = 0; block < count; ++block) total += blocks[block];
  *sum = add ? *sum + total : total;
}

const RegisterKernels<ClipKernels> clip_kernels(
    DeviceKind::cpu, {clip_sum_of_squares,
                      [](float* values, std::size_t n, const double* sum, double max_norm) {
                        scale({values, n}, clip_factor_of(std::sqrt(*sum), max_norm));
                      },
                      [](const double* sum, double max_norm, StepParameters* parameters) {
                        parameters->gradient_scale = clip_factor_of(std::sqrt(*sum), max_norm);
                      }});

}  // namespace

void check_clip_norm(double max_norm) {
  if (!(max_norm > 0))
    throw UserError("a clipping norm must be greater than 0, not " + short_text(max_norm) +
                    "; leave the key out to clip nothing");
}

double sum_of_squares(std::span<const float> values) {
  std::vector<double> blocks(blocks_of(values.size()));
  double sum = 0;
  clip_sum_of_squares(values.data(), values.size(), blocks.data(), &sum, false);
  return sum;
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
  const std::int64_t blocks = static_cast<std::int64_t>(blocks_of(values.size()));
#pragma omp parallel for schedule(static) if (values.size() >= kParallelNorm)
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::size_t begin = static_cast<std::size_t>(block) * kBlock;
    multiply(values.data() + begin, std::min(kBlock, values.size() - begin), static_cast<float>(factor));
  }
}

Clip::Clip(Device device, std::size_t longest)
    : longest_(longest),
      kernels_(*find_kernels<ClipKernels>(device.kind)),
      memory_(Tensor::zeros(
          {static_cast<std::int64_t>((1 + blocks_of(longest)) * sizeof(double) / sizeof(float))},
          Layout::plain, device)) {}

void Clip::sum_of_squares(std::span<const float> values, bool add) {
  TOPKNOT_CHECK(values.size() <= longest_, "a longer vector than clipping was made for");
  kernels_.sum_of_squares(values.data(), values.size(), memory() + 1, memory(), add);
}

void Clip::scale(std::span<float> values, double max_norm) {
  check_clip_norm(max_norm);
  kernels_.scale(values.data(), values.size(), memory(), max_norm);
}

void Clip::set_gradient_scale(double max_norm, StepParameters* parameters) {
  check_clip_norm(max_norm);
  kernels_.set_gradient_scale(memory(), max_norm, parameters);
}

}  // namespace topknot
