#pragma once
// The shared part of low-rank methods: products of a matrix with thin factors; which tensors of a group are
// approximated, where their factors lie, and the passes over the group. P of all matrices is one buffer, each
// [rows, rank] by rows; Q another, each [rank, cols]: the transpose, by rows. All other tensors are sent as
// they are, after the factors of a message.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "compress/compressor.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"

namespace topknot::lowrank {

// Products of a matrix M [rows, cols] with thin factors, as power iteration needs them: P [rows, rank] by
// rows, and Q as its transpose [rank, cols], so that every inner loop runs along a row of M. One thread's
// part each: disjoint rows or columns. Sums are in float: over lanes and in order. None of them throws.

inline constexpr std::size_t kStrip = 256;  // columns that transposed_product takes at a time

// P = M Q for rows [begin, end): every element of M is read ceil(rank / 4) times, once at rank 4.
void product(const float* m, std::size_t begin, std::size_t end, std::size_t cols, const float* q,
             std::size_t rank, float* p);

// Q = M^T P for columns [begin, end), at most kStrip; one read of M.
void transposed_product(const float* m, std::size_t rows, std::size_t cols, std::size_t begin,
                        std::size_t end, const float* p, std::size_t rank, float* q);

// For rows [begin, end): average = mean_p mean_q^T and, where own_p is not null, u -= own_p own_q^T.
// `average` may be u's memory if own_p is null.
struct Factors {
  const float *p, *q;
};
void rebuild(float* u, float* average, std::size_t begin, std::size_t end, std::size_t cols, std::size_t rank,
             Factors own, Factors mean);

// An orthonormal basis of the columns of a factor: Householder's QR, in double (Golub and Van Loan, Matrix
// Computations, 5.2), with the signs of Gram-Schmidt (R has a positive diagonal). The columns come out
// orthonormal whatever goes in: a column that is zero, or an exact combination of those before it, is
// replaced by a random direction, so that a factor which lost a rank (a step of zero gradients) finds it
// again. Gram-Schmidt with an epsilon, as in the authors' code of PowerSGD, leaves it zero for ever.
//
// Element (i, k) of the n x rank matrix is a[i * row_stride + k * column_stride]; n >= rank, all finite.
// `scratch` is reused memory. `fill` gives the random directions; the same on all ranks.
void orthonormalise(float* a, std::size_t n, std::size_t rank, std::size_t row_stride,
                    std::size_t column_stride, const CounterRng& fill, std::vector<double>& scratch);

class Plan {
 public:
  // A tensor is approximated at rank min(compress.rank, rows, cols), if it has columns and numel /
  // (factors_per_step * rank * (rows + cols)) exceeds compress.min_compression. factors_per_step: which share
  // of the two factors is sent per step; 1 for both, 0.5 for one in turn.
  Plan(const CompressOptions& options, const GroupSpec& group, double factors_per_step);

  std::size_t numel() const { return numel_; }
  std::size_t p_size() const { return p_size_; }
  std::size_t q_size() const { return q_size_; }
  std::size_t plain_size() const { return plain_size_; }  // entries that are sent as they are
  bool any() const { return !matrices_.empty(); }

  // Independent standard normal numbers, the same on all ranks.
  void draw_q(std::span<float> q) const;
  void orthonormalise_p(std::span<float> p);
  void orthonormalise_q(std::span<float> q);

  void product(std::span<const float> u, std::span<const float> q, std::span<float> p) const;
  void transposed_product(std::span<const float> u, std::span<const float> p, std::span<float> q) const;

  void copy_plain(std::span<const float> u, std::span<float> out) const;
  // The averages of all tensors into `average`; what they stand for leaves u if `has_residual`: own_p own_q^T
  // for a matrix, everything for the others. `plain` is averaged.
  struct Factors {
    std::span<const float> p, q;
  };
  void rebuild(std::span<float> u, std::span<float> average, bool has_residual, Factors own, Factors mean,
               std::span<const float> plain) const;

  // The largest magnitude of a factor whose product with an orthonormal one is finite for certain.
  float bound() const;

 private:
  struct Matrix {
    std::size_t begin, rows, cols, rank, p, q;  // p, q: where its factors begin
  };
  struct Piece {
    std::size_t matrix, begin, end;  // of its rows, or columns
  };
  CounterRng random(std::uint32_t use, const Matrix& matrix) const;
  void add_plain(std::size_t begin, std::size_t end);

  std::size_t numel_ = 0, offset_ = 0, p_size_ = 0, q_size_ = 0, plain_size_ = 0;
  std::uint64_t seed_ = 0;
  std::vector<Matrix> matrices_;
  std::vector<Piece> row_pieces_, column_pieces_;
  std::vector<std::pair<std::size_t, std::size_t>> plain_;  // ranges of the group
  std::vector<double> scratch_;
};

// No NaN, and no magnitude above the bound.
bool within(std::span<const float> x, float bound);

// Refuses what low-rank methods have no use for; returns whether there is error feedback.
bool check_options(const CompressOptions& options);

// compress.rank and .min_compression.
const std::vector<Option>& options();

// The compressor of low-rank methods: error feedback over the group, sums of factors, averages made of these.
class LowRankCompressor : public HostCompressor {
 public:
  LowRankCompressor(const CompressOptions& options, const GroupSpec& group, double factors_per_step)
      : HostCompressor(group, check_options(options)), plan_(options, group, factors_per_step) {}

  Message encode(Slice slice, const StepContext& context) final;
  std::optional<Message> decode(const Round& round) final {
    check_decode();
    std::optional<Message> next = receive(round);
    if (!next) phase_ = Phase::decoded;
    return next;
  }
  std::span<float> commit(std::span<const std::uint32_t>) final {
    check_commit();
    rebuild(slice_.gradient, average());
    phase_ = Phase::idle;
    return average();
  }
  Diagnostics diagnostics() const final { return {.selected = sent_, .accumulated = slice_.gradient}; }

 protected:
  // Puts the first round's factor and the uncompressed tensors of u, times this rank's weight, into sum_.
  virtual void project(std::span<const float> u) = 0;
  // Takes what came back and sets finite_; returns a Message for one more round.
  virtual std::optional<Message> receive(const Round& round) = 0;
  // Turns u into the residual, if there is one, and what was summed into the average.
  virtual void rebuild(std::span<float> u, std::span<float> average) = 0;

  void check_idle(const char* what) const { TOPKNOT_CHECK(phase_ == Phase::idle, what); }

  Plan plan_;
  std::vector<float> sum_;  // what is sent first, and its sum
  std::size_t sent_ = 0;    // floats, in all rounds
};

// Takes a saved factor of this length. Throws Error if it is not finite.
std::vector<float> load_factor(StateReader& reader, std::size_t size);

}  // namespace topknot::lowrank
