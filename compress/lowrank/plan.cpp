#include "compress/lowrank/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compress/compressor.h"
#include "compress/lowrank/matrix.h"
#include "compress/parallel.h"
#include "compress/select/passes/keys.h"
#include "compress/select/passes/passes.h"
#include "compress/state.h"
#include "nn/base/check.h"
#include "nn/core/simd.h"

namespace topknot::lowrank {
namespace {

enum RandomUse : std::uint32_t { kStart, kFillP, kFillQ };

TOPKNOT_MULTIVERSION MagnitudeKey largest_key(const float* x, std::size_t n) {
  MagnitudeKey largest = 0;
  for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, key_of(x[i]));
  return largest;
}

// Pieces write apart from each other, so that results do not depend on which thread takes which.
template <class Pieces, class Body>
void for_pieces(const Pieces& pieces, std::size_t work, Body&& body) {
  const std::size_t threads = std::min(part_count(work), std::max<std::size_t>(pieces.size(), 1));
#pragma omp parallel for num_threads(static_cast <int>(threads)) schedule(dynamic, 1) if (threads > 1)
  for (std::size_t i = 0; i < pieces.size(); ++i) body(pieces[i]);
}

}  // namespace

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

void accumulate(std::span<float> gradient, std::span<const float> residual) {
  TOPKNOT_CHECK(residual.size() == gradient.size(),
                "error feedback needs a residual as long as the gradient");
  Candidates none;
  accumulate_and_collect(gradient, residual, kLargestFinite, 0, none);
}

void scale(std::span<float> x, float factor) {
  if (factor == 1.0f) return;
  for_parts(x.size(), part_count(x.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
    multiply(x.data() + begin, end - begin, factor);
  });
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
      {.name = "rank", .standard = 4, .help = "rank of the approximation", .least = 1, .greatest = 1e6},
      {.name = "min_compression",
       .standard = 2.0,
       .help = "tensors that would shrink less are sent as they are",
       .least = 0,
       .greatest = 1e9}};
  return declared;
}

bool check_options(const CompressOptions& options) {
  reject_sparse_options(options, "factors of matrices, as sums of 32-bit floats", true);
  return options.memory != "none";
}

Message LowRankCompressor::encode(Slice slice, const StepContext& context) {
  check_idle("encode before the last step was committed or discarded");
  TOPKNOT_CHECK(slice.gradient.size() == plan_.numel(), "a slice of another length than the group's");
  TOPKNOT_CHECK(context.weights.empty() || context.weights.size() == static_cast<std::size_t>(ranks_),
                "one weight per rank");
  slice_ = slice;
  weight_ = context.weights.empty() ? 1.0f : context.weights[static_cast<std::size_t>(context.rank)];
  if (has_residual_) accumulate(slice.gradient, slice.residual);
  project(slice.gradient);
  phase_ = Phase::encoded;
  return sum_message(sum_);
}

std::optional<Message> LowRankCompressor::decode(const Round& round) {
  TOPKNOT_CHECK(phase_ == Phase::encoded, "decode without encode");
  std::optional<Message> next = receive(round);
  if (!next) phase_ = Phase::decoded;
  return next;
}

std::span<float> LowRankCompressor::commit(std::span<const std::uint32_t>) {
  TOPKNOT_CHECK(phase_ == Phase::decoded && finite_, "commit without a decoded, finite step");
  const std::span<float> average = has_residual_ ? slice_.residual : slice_.gradient;
  rebuild(slice_.gradient, average);
  phase_ = Phase::idle;
  return average;
}

std::vector<float> load_factor(StateReader& reader, std::size_t size) {
  std::vector<float> factor = reader.get_list<float>(size);
  if (!within(factor, std::numeric_limits<float>::max()))
    StateReader::fail("has a factor that is not finite");
  return factor;
}

}  // namespace topknot::lowrank
