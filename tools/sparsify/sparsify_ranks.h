#pragma once
// The ranks of `sparsify` in one thread: their compressors are driven through encode, decode and commit or
// discard as the exchange drives them (dist/exchange/exchange.h), each rank with its two memories.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "compress/compressor.h"
#include "nn/core/gradient_form.h"

namespace topknot {

// One rank in a step.
template <class T>
struct RankStep {
  std::size_t count = 0;  // entries sent
  double threshold = 0;   // Compressor::threshold()
  std::size_t over_capacity = 0;
  // Messages of all rounds, as ExchangeStats counts them: a sum counts its length once each way, a gather
  // brings the blocks of the other ranks.
  std::size_t bytes_up = 0, bytes_down = 0;
  // The contribution before its weight, as the ranks decoded it, where the method reports it. Without indices the
  // values are of all positions.
  bool known = false;
  std::vector<std::uint32_t> indices;
  std::vector<T> values;
};

template <class T>
struct RanksStep {
  bool committed = false;  // false: a NaN or Inf; the step was discarded on all ranks
  std::vector<RankStep<T>> ranks;
  std::span<const T> average;  // where committed; until the next step
};

template <class T>
class SparsifyRanks {
 public:
  virtual ~SparsifyRanks() = default;
  // Where a step's gradient goes before step().
  std::span<T> gradient(std::size_t rank) { return memories_[rank].gradient; }
  // `info.rank` is set here. Throws Error where ranks differ in the average.
  virtual RanksStep<T> step(const StepInfo& info) = 0;
  virtual GradientForm form() const = 0;

 protected:
  explicit SparsifyRanks(const GroupSpec& group);
  // After commit: which memory holds the average; it becomes `gradient`.
  std::span<const T> settle(std::size_t rank, std::span<T> average);

  struct Memories {
    std::vector<T> gradient, spare;
  };
  std::vector<Memories> memories_;  // by rank
};

// Throw UserError where the options make no sense together. In double the method must be a combination of
// selection and memory (compress/sparse_step.h) whose value codec is exact; blocks are counted as such with
// values of 8 bytes.
std::unique_ptr<SparsifyRanks<float>> make_float_ranks(const CompressOptions& options,
                                                       const GroupSpec& group);
std::unique_ptr<SparsifyRanks<double>> make_double_ranks(const CompressOptions& options,
                                                         const GroupSpec& group);

}  // namespace topknot
