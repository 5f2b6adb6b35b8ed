#include "compress/transform.h"

#include <array>
#include <cmath>
#include <numbers>

#include "compress/parallel.h"
#include "nn/base/check.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

constexpr std::size_t kBlock = BlockTransform::kBlock;
using Square = std::array<float, kBlock * kBlock>;

std::vector<float> cosines_of(std::size_t n) {
  std::vector<float> matrix(n * n);
  for (std::size_t k = 0; k < n; ++k)
    for (std::size_t j = 0; j < n; ++j) {
      const double angle =
          std::numbers::pi * static_cast<double>((2 * j + 1) * k) / static_cast<double>(2 * n);
      matrix[k * n + j] =
          static_cast<float>(std::sqrt((k == 0 ? 1.0 : 2.0) / static_cast<double>(n)) * std::cos(angle));
    }
  return matrix;
}

// to[m][w] = matrix[m][m] from[m][w], or its transpose times that; sums from the first term on.
TOPKNOT_MULTIVERSION void from_left(const float* matrix, bool transposed, const float* from, std::size_t m,
                                    std::size_t w, float* to) {
  std::fill(to, to + m * w, 0.0f);
  for (std::size_t k = 0; k < m; ++k)
    for (std::size_t j = 0; j < m; ++j) {
      const float factor = transposed ? matrix[j * m + k] : matrix[k * m + j];
      for (std::size_t i = 0; i < w; ++i) to[k * w + i] += factor * from[j * w + i];
    }
}

void transpose(const float* from, std::size_t rows, std::size_t cols, float* to) {
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < cols; ++c) to[c * rows + r] = from[r * cols + c];
}

}  // namespace

std::vector<TensorSpec> tensors_of(const GroupSpec& group) {
  return group.tensors.empty() ? std::vector<TensorSpec>{{0, group.numel, 1}} : group.tensors;
}

BlockTransform::BlockTransform(const GroupSpec& group, bool cosine)
    : cosine_(cosine), cosines_(kBlock + 1), before_(group.numel) {
  for (const TensorSpec& tensor : tensors_of(group)) {
    const std::size_t rows = side(tensor.rows), cols = side(tensor.cols);
    for (const std::size_t n : {rows, cols})
      if (cosine && cosines_[n].empty()) cosines_[n] = cosines_of(n);
    std::size_t to = tensor.begin;
    for (std::size_t row = 0; row < tensor.rows; row += rows)
      for (std::size_t col = 0; col < tensor.cols; col += cols) {
        blocks_.push_back({tensor.begin + row * tensor.cols + col, tensor.cols, to, rows, cols});
        to += rows * cols;
      }
  }
}

void BlockTransform::apply(std::span<float> values, bool forward) {
  TOPKNOT_CHECK(values.size() == before_.size(), "a transform of another length than the group's");
  std::copy(values.begin(), values.end(), before_.begin());
  const auto parts = static_cast<int>(std::min(part_count(values.size()), blocks_.size()));
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const Block& block = blocks_[b];
    const std::size_t h = block.rows, w = block.cols;
    Square at, turned;
    for (std::size_t r = 0; r < h; ++r)
      for (std::size_t c = 0; c < w; ++c)
        at[r * w + c] = before_[forward ? block.from + r * block.stride + c : block.to + r * w + c];
    if (cosine_) {
      from_left(cosines_[h].data(), !forward, at.data(), h, w, turned.data());
      transpose(turned.data(), h, w, at.data());
      from_left(cosines_[w].data(), !forward, at.data(), w, h, turned.data());
      transpose(turned.data(), w, h, at.data());
    }
    for (std::size_t r = 0; r < h; ++r)
      for (std::size_t c = 0; c < w; ++c)
        values[forward ? block.to + r * w + c : block.from + r * block.stride + c] = at[r * w + c];
  }
}

std::unique_ptr<BlockTransform> make_transform(const std::string& name, const GroupSpec& group) {
  if (name == "none") return nullptr;
  TOPKNOT_CHECK(name == "block" || name == "dct", "an unknown transform");
  return std::make_unique<BlockTransform>(group, name == "dct");
}

}  // namespace topknot
