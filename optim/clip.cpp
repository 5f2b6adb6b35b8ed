#include "optim/clip.h"

#include <algorithm>
#include <cmath>
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

double sum_of_blocks(const float* values, std::size_t n, double* blocks) {
  const std::int64_t count = static_cast<std::int64_t>(blocks_of(n));
#pragma omp parallel for schedule(static) if (n >= kParallelNorm)
  for (std::int64_t block = 0; block < count; ++block) {
    const std::size_t begin = static_cast<std::size_t>(block) * kBlock;
    blocks[block] = block_sum_of_squares(values + begin, std::min(kBlock, n - begin));
  }
  double total = 0;
  for (std::int64_t block = 0; block < count; ++block) total += blocks[block];
  return total;
}

void clip_sum_of_squares(const ClipVectors& vectors, double* memory, bool add) {
  double total = add ? memory[0] : 0;
  for (std::size_t i = 0; i < vectors.count; ++i) {
    memory[1 + i] = sum_of_blocks(vectors.data[i], vectors.size[i], memory + clip_doubles(0));
    total += memory[1 + i];
  }
  memory[0] = total;
}

void clip_scale(const ClipVectors& vectors, const double* memory, bool each, double max_norm) {
  for (std::size_t i = 0; i < vectors.count; ++i)
    scale({vectors.data[i], vectors.size[i]}, clip_factor_of(std::sqrt(memory[each ? 1 + i : 0]), max_norm));
}

const bool clip_kernels = add_cpu_kernels<ClipKernels>(
    {clip_sum_of_squares, clip_scale, [](const double* memory, double max_norm, StepParameters* parameters) {
       parameters->gradient_scale = clip_factor_of(std::sqrt(memory[0]), max_norm);
     }});

}  // namespace

void check_clip_norm(double max_norm) {
  if (!(max_norm > 0))
    throw UserError("a clipping norm must be greater than 0, not " + short_text(max_norm) +
                    "; leave the key out to clip nothing");
}

double sum_of_squares(std::span<const float> values) {
  std::vector<double> blocks(blocks_of(values.size()));
  return sum_of_blocks(values.data(), values.size(), blocks.data());
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

static_assert(sizeof(ClipVectors) <= 4000);

ClipVectors::ClipVectors(std::span<const std::span<float>> vectors)
    : count(static_cast<std::uint32_t>(vectors.size())) {
  TOPKNOT_CHECK(vectors.size() <= kMost, "too many vectors for a launch");
  first_block[0] = 0;
  for (std::size_t i = 0; i < vectors.size(); ++i) {
    data[i] = vectors[i].data(), size[i] = vectors[i].size();
    first_block[i + 1] = first_block[i] + static_cast<std::uint32_t>(blocks_of(size[i]));
  }
}

Clip::Clip(Device device, std::size_t elements)
    : elements_(elements),
      kernels_(*find_kernels<ClipKernels>(device.kind)),
      memory_(
          Tensor::zeros({static_cast<std::int64_t>(clip_doubles(blocks_of(elements) + ClipVectors::kMost) *
                                                   sizeof(double) / sizeof(float))},
                        Layout::plain, device)) {}

// `work` gets each batch, and whether it is a later one.
void Clip::in_batches(Vectors vectors, const auto& work) {
  std::size_t first = 0;
  do {
    const Vectors batch = vectors.subspan(first, std::min(ClipVectors::kMost, vectors.size() - first));
    std::size_t elements = 0;
    for (const std::span<float> vector : batch) elements += vector.size();
    TOPKNOT_CHECK(elements <= elements_, "longer vectors than clipping was made for");
    work(ClipVectors(batch), first > 0);
    first += batch.size();
  } while (first < vectors.size());
}

void Clip::sum_of_squares(Vectors vectors) {
  in_batches(vectors,
             [&](const ClipVectors& batch, bool later) { kernels_.sum_of_squares(batch, memory(), later); });
}

void Clip::scale(Vectors vectors, double max_norm) {
  check_clip_norm(max_norm);
  in_batches(vectors, [&](const ClipVectors& batch, bool) {
    kernels_.scale(batch, memory(), /*each=*/false, max_norm);
  });
}

void Clip::clip_each(Vectors vectors, double max_norm) {
  check_clip_norm(max_norm);
  in_batches(vectors, [&](const ClipVectors& batch, bool) {
    kernels_.sum_of_squares(batch, memory(), false);
    kernels_.scale(batch, memory(), /*each=*/true, max_norm);
  });
}

void Clip::set_gradient_scale(double max_norm, StepParameters* parameters) {
  check_clip_norm(max_norm);
  kernels_.set_gradient_scale(memory(), max_norm, parameters);
}

}  // namespace topknot
