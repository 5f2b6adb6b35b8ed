#include "compress/lowrank/plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "compress/parallel.h"
#include "compress/select/passes/keys.h"
#include "compress/select/passes/passes.h"
#include "compress/state.h"
#include "nn/core/simd.h"

namespace topknot::lowrank {
namespace {

// Halves in a fixed order.
TOPKNOT_INLINE float sum_lanes(Lanes v) {
  float x[kLanes];
  std::memcpy(x, &v, sizeof x);
  for (std::size_t width = kLanes / 2; width > 0; width /= 2)
    for (std::size_t i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

TOPKNOT_INLINE Lanes load_some(const float* p, std::size_t count) {
  Lanes v = {};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

// Rows x Width dot products of length cols. The sum of one of them does not depend on Rows or Width.
template <int Rows, int Width>
TOPKNOT_INLINE void dots(const float* m, std::size_t cols, const float* q, float* p, std::size_t rank) {
  Lanes sums[Rows][Width] = {};
  std::size_t j = 0;
  for (; j + kLanes <= cols; j += kLanes)
    for (int k = 0; k < Width; ++k) {
      const Lanes factor = load(q + static_cast<std::size_t>(k) * cols + j);
      for (int i = 0; i < Rows; ++i) sums[i][k] += load(m + static_cast<std::size_t>(i) * cols + j) * factor;
    }
  if (j < cols)
    for (int k = 0; k < Width; ++k) {
      const Lanes factor = load_some(q + static_cast<std::size_t>(k) * cols + j, cols - j);
      for (int i = 0; i < Rows; ++i)
        sums[i][k] += load_some(m + static_cast<std::size_t>(i) * cols + j, cols - j) * factor;
    }
  for (int i = 0; i < Rows; ++i)
    for (int k = 0; k < Width; ++k)
      p[static_cast<std::size_t>(i) * rank + static_cast<std::size_t>(k)] = sum_lanes(sums[i][k]);
}

template <int Rows>
TOPKNOT_INLINE void row_dots(const float* m, std::size_t cols, const float* q, float* p, std::size_t rank) {
  std::size_t k = 0;
  for (; k + 4 <= rank; k += 4) dots<Rows, 4>(m, cols, q + k * cols, p + k, rank);
  for (; k < rank; ++k) dots<Rows, 1>(m, cols, q + k * cols, p + k, rank);
}

TOPKNOT_MULTIVERSION double dot(const double* a, const double* b, std::size_t n) {
  constexpr std::size_t lanes = 8;
  double sums[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (std::size_t l = 0; l < lanes; ++l) sums[l] += a[i + l] * b[i + l];
  for (std::size_t l = 0; i < n; ++i, ++l) sums[l] += a[i] * b[i];
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

TOPKNOT_MULTIVERSION void subtract(double* a, const double* b, double factor, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) a[i] -= factor * b[i];
}

// Far below the rounding of float input: only exact combinations leave so little.
constexpr double kDependent = 1e-13;

enum RandomUse : std::uint32_t { kStart, kFillP, kFillQ };

// Pieces write apart from each other, so that results do not depend on which thread takes which.
void for_pieces(const auto& pieces, std::size_t work, auto&& body) {
  const std::size_t threads = std::min(part_count(work), std::max<std::size_t>(pieces.size(), 1));
#pragma omp parallel for num_threads(static_cast <int>(threads)) schedule(dynamic, 1) if (threads > 1)
  for (std::size_t i = 0; i < pieces.size(); ++i) body(pieces[i]);
}

}  // namespace

TOPKNOT_MULTIVERSION void product(const float* m, std::size_t begin, std::size_t end, std::size_t cols,
                                  const float* q, std::size_t rank, float* p) {
  std::size_t i = begin;
  for (; i + 2 <= end; i += 2) row_dots<2>(m + i * cols, cols, q, p + i * rank, rank);
  for (; i < end; ++i) row_dots<1>(m + i * cols, cols, q, p + i * rank, rank);
}

TOPKNOT_MULTIVERSION void transposed_product(const float* m, std::size_t rows, std::size_t cols,
                                             std::size_t begin, std::size_t end, const float* p,
                                             std::size_t rank, float* q) {
  const std::size_t width = end - begin;
  for (std::size_t k = 0; k < rank; ++k) std::fill_n(q + k * cols + begin, width, 0.0f);
  std::size_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    const float* a = m + i * cols + begin;
    const float *b = a + cols, *c = b + cols, *d = c + cols;
    for (std::size_t k = 0; k < rank; ++k) {
      const float pa = p[i * rank + k], pb = p[(i + 1) * rank + k], pc = p[(i + 2) * rank + k],
                  pd = p[(i + 3) * rank + k];
      float* __restrict out = q + k * cols + begin;
      for (std::size_t j = 0; j < width; ++j) out[j] += (a[j] * pa + b[j] * pb) + (c[j] * pc + d[j] * pd);
    }
  }
  for (; i < rows; ++i) {
    const float* a = m + i * cols + begin;
    for (std::size_t k = 0; k < rank; ++k) {
      const float pa = p[i * rank + k];
      float* __restrict out = q + k * cols + begin;
      for (std::size_t j = 0; j < width; ++j) out[j] += a[j] * pa;
    }
  }
}

TOPKNOT_MULTIVERSION void rebuild(float* u, float* average, std::size_t begin, std::size_t end,
                                  std::size_t cols, std::size_t rank, Factors own, Factors mean) {
  // A row's piece is made in the first-level cache.
  constexpr std::size_t piece = 1024;
  float scratch[piece];
  const auto combine = [&](const Factors& from, std::size_t row, std::size_t column, std::size_t width)
      __attribute__((always_inline)) {
    std::fill_n(scratch, width, 0.0f);
    for (std::size_t k = 0; k < rank; ++k) {
      const float factor = from.p[row * rank + k];
      const float* q = from.q + k * cols + column;
      for (std::size_t j = 0; j < width; ++j) scratch[j] += factor * q[j];
    }
  };
  for (std::size_t i = begin; i < end; ++i)
    for (std::size_t column = 0; column < cols; column += piece) {
      const std::size_t width = std::min(piece, cols - column);
      if (own.p) {
        combine(own, i, column, width);
        float* __restrict out = u + i * cols + column;
        for (std::size_t j = 0; j < width; ++j) out[j] -= scratch[j];
      }
      combine(mean, i, column, width);
      std::memcpy(average + i * cols + column, scratch, width * sizeof(float));
    }
}

void orthonormalise(float* a, std::size_t n, std::size_t rank, std::size_t row_stride,
                    std::size_t column_stride, const CounterRng& fill, std::vector<double>& scratch) {
  TOPKNOT_CHECK(rank <= n, "more orthonormal columns than rows");
  // Columns of A turn into reflections in place, then the basis is made after them.
  scratch.resize(2 * n * rank + 2 * rank);
  double *reflections = scratch.data(), *basis = reflections + n * rank, *tau = basis + n * rank,
         *sign = tau + rank;
  for (std::size_t k = 0; k < rank; ++k)
    for (std::size_t i = 0; i < n; ++i)
      reflections[k * n + i] = static_cast<double>(a[i * row_stride + k * column_stride]);
  for (std::size_t k = 0; k < rank; ++k) {
    double* v = reflections + k * n + k;
    const std::size_t length = n - k;
    const double whole = dot(reflections + k * n, reflections + k * n, n);
    double square = dot(v, v, length);
    if (square <= kDependent * kDependent * whole) {
      // A Gaussian vector is as random after the reflections so far as before them.
      for (std::size_t i = 0; i < length; ++i)
        v[i] = static_cast<double>(fill.normal(static_cast<std::uint64_t>(k) * n + i));
      square = dot(v, v, length);
    }
    const double norm = std::sqrt(square);
    sign[k] = v[0] < 0 ? 1.0 : -1.0;  // of R's diagonal: the one that does not cancel in v[0]
    v[0] -= sign[k] * norm;
    tau[k] = 2.0 / dot(v, v, length);
    for (std::size_t c = k + 1; c < rank; ++c) {
      double* column = reflections + c * n + k;
      subtract(column, v, tau[k] * dot(v, column, length), length);
    }
  }
  std::fill_n(basis, n * rank, 0.0);
  for (std::size_t k = rank; k-- > 0;) {
    basis[k * n + k] = 1.0;
    const double* v = reflections + k * n + k;
    for (std::size_t c = k; c < rank; ++c) {
      double* column = basis + c * n + k;
      subtract(column, v, tau[k] * dot(v, column, n - k), n - k);
    }
  }
  for (std::size_t k = 0; k < rank; ++k)
    for (std::size_t i = 0; i < n; ++i)
      a[i * row_stride + k * column_stride] = static_cast<float>(sign[k] * basis[k * n + i]);
}

Plan::Plan(const CompressOptions& options, const GroupSpec& group, double factors_per_step)
    : numel_(group.numel), offset_(group.offset), seed_(options.seed) {
  const auto most_rank = static_cast<std::size_t>(options.get<int>(lowrank::options()[0]));
  const double min_compression = options.get<double>(lowrank::options()[1]);
  std::size_t covered = 0;
  for (const TensorSpec& tensor : group.tensors) {
    TOPKNOT_CHECK(tensor.begin == covered, "tensors must cover their group in order");
    const std::size_t numel = tensor.rows * tensor.cols;
    covered += numel;
    const std::size_t rank = std::min({most_rank, tensor.rows, tensor.cols});
    const double sent = factors_per_step * static_cast<double>(rank * (tensor.rows + tensor.cols));
    if (tensor.cols <= 1 || numel == 0 || static_cast<double>(numel) <= min_compression * sent) {
      add_plain(tensor.begin, covered);
      continue;
    }
    const std::size_t index = matrices_.size();
    matrices_.push_back({tensor.begin, tensor.rows, tensor.cols, rank, p_size_, q_size_});
    p_size_ += tensor.rows * rank;
    q_size_ += tensor.cols * rank;
    const std::size_t rows = std::max<std::size_t>(1, kChunk / tensor.cols);
    for (std::size_t i = 0; i < tensor.rows; i += rows)
      row_pieces_.push_back({index, i, std::min(i + rows, tensor.rows)});
    for (std::size_t j = 0; j < tensor.cols; j += kStrip)
      column_pieces_.push_back({index, j, std::min(j + kStrip, tensor.cols)});
  }
  if (group.tensors.empty()) add_plain(0, numel_), covered = numel_;
  TOPKNOT_CHECK(covered == numel_, "tensors must cover their group");
}

void Plan::add_plain(std::size_t begin, std::size_t end) {
  if (begin == end) return;
  plain_size_ += end - begin;
  if (!plain_.empty() && plain_.back().second == begin)
    plain_.back().second = end;
  else
    plain_.emplace_back(begin, end);
}

CounterRng Plan::random(std::uint32_t use, const Matrix& matrix) const {
  return CounterRng(seed_, RngUse::compress, use, static_cast<std::uint32_t>(offset_ + matrix.begin));
}

void Plan::draw_q(std::span<float> q) const {
  for (const Matrix& matrix : matrices_) {
    const CounterRng rng = random(kStart, matrix);
    for (std::size_t i = 0; i < matrix.rank * matrix.cols; ++i) q[matrix.q + i] = rng.normal(i);
  }
}

void Plan::orthonormalise_p(std::span<float> p) {
  for (const Matrix& matrix : matrices_)
    orthonormalise(p.data() + matrix.p, matrix.rows, matrix.rank, matrix.rank, 1, random(kFillP, matrix),
                   scratch_);
}

void Plan::orthonormalise_q(std::span<float> q) {
  for (const Matrix& matrix : matrices_)
    orthonormalise(q.data() + matrix.q, matrix.cols, matrix.rank, 1, matrix.cols, random(kFillQ, matrix),
                   scratch_);
}

void Plan::product(std::span<const float> u, std::span<const float> q, std::span<float> p) const {
  for_pieces(row_pieces_, numel_, [&](const Piece& piece) {
    const Matrix& matrix = matrices_[piece.matrix];
    lowrank::product(u.data() + matrix.begin, piece.begin, piece.end, matrix.cols, q.data() + matrix.q,
                     matrix.rank, p.data() + matrix.p);
  });
}

void Plan::transposed_product(std::span<const float> u, std::span<const float> p, std::span<float> q) const {
  for_pieces(column_pieces_, numel_, [&](const Piece& piece) {
    const Matrix& matrix = matrices_[piece.matrix];
    lowrank::transposed_product(u.data() + matrix.begin, matrix.rows, matrix.cols, piece.begin, piece.end,
                                p.data() + matrix.p, matrix.rank, q.data() + matrix.q);
  });
}

void Plan::copy_plain(std::span<const float> u, std::span<float> out) const {
  std::size_t at = 0;
  for (const auto& [begin, end] : plain_) {
    std::copy(u.data() + begin, u.data() + end, out.data() + at);
    at += end - begin;
  }
}

void Plan::rebuild(std::span<float> u, std::span<float> average, bool has_residual, Factors own, Factors mean,
                   std::span<const float> plain) const {
  for_pieces(row_pieces_, numel_, [&](const Piece& piece) {
    const Matrix& matrix = matrices_[piece.matrix];
    const auto part = [&](const Factors& factors) {
      return lowrank::Factors{factors.p.data() + matrix.p, factors.q.data() + matrix.q};
    };
    lowrank::rebuild(u.data() + matrix.begin, average.data() + matrix.begin, piece.begin, piece.end,
                     matrix.cols, matrix.rank, has_residual ? part(own) : lowrank::Factors{}, part(mean));
  });
  std::size_t at = 0;
  for (const auto& [begin, end] : plain_) {
    std::copy_n(plain.data() + at, end - begin, average.data() + begin);
    if (has_residual) std::fill(u.data() + begin, u.data() + end, 0.0f);
    at += end - begin;
  }
}

float Plan::bound() const {
  std::size_t rank = 1;
  for (const Matrix& matrix : matrices_) rank = std::max(rank, matrix.rank);
  return std::numeric_limits<float>::max() / static_cast<float>(4 * rank);
}

bool within(std::span<const float> x, float bound) {
  const std::size_t parts = part_count(x.size());
  std::vector<MagnitudeKey> largest(parts);
  for_parts(x.size(), parts, [&](std::size_t part, std::size_t begin, std::size_t end) {
    largest[part] = largest_key(x.data() + begin, end - begin);
  });
  return *std::max_element(largest.begin(), largest.end()) <= key_of(bound);
}

const std::vector<Option>& options() {
  static const std::vector<Option> declared = {
      {"rank", 4, "rank of the approximation", 1, 1e6},
      {"min_compression", 2.0, "tensors that would shrink less are sent as they are", 0, 1e9}};
  return declared;
}

bool check_options(const CompressOptions& options) {
  reject_sparse_options(options, "factors of matrices, as sums of 32-bit floats", true);
  return options.memory != "none";
}

Message LowRankCompressor::encode(Slice slice, const StepContext& context) {
  check_encode(slice, context);
  if (has_residual_) accumulate(slice.gradient, residual());
  project(slice.gradient);
  phase_ = Phase::encoded;
  return sum_message(sum_);
}

std::vector<float> load_factor(StateReader& reader, std::size_t size) {
  std::vector<float> factor = reader.get_list<float>(size);
  if (!within(factor, std::numeric_limits<float>::max()))
    StateReader::fail("has a factor that is not finite");
  return factor;
}

}  // namespace topknot::lowrank
