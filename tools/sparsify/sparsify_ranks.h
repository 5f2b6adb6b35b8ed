#pragma once
// The ranks of `sparsify` in one thread: their compressors are driven through encode, decode and commit or
// discard as the exchange drives them (dist/exchange/exchange.h), each rank with its two memories.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "nn/core/step.h"

namespace topknot {

// One rank in a step.
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
  std::vector<float> values;
};

struct RanksStep {
  bool committed = false;  // false: a NaN or Inf; the step was discarded on all ranks
  std::vector<RankStep> ranks;
  std::span<const float> average;  // where committed; until the next step
};

class SparsifyRanks {
 public:
  // Throws UserError where the options make no sense together.
  SparsifyRanks(const CompressOptions& options, const GroupSpec& group);

  // Where a step's gradient goes before step().
  std::span<float> gradient(std::size_t rank) { return memories_[rank].gradient; }
  // `info.rank` is set here. Throws Error where ranks differ in the average.
  RanksStep step(const StepContext& info);
  Applied applied() const { return compressors_[0]->applied(); }

 private:
  struct Memories {
    std::vector<float> gradient, residual;
  };
  std::size_t size() const { return compressors_.size(); }
  // Carries one round of messages; returns those of the next, or none.
  std::vector<Message> round(std::vector<Message>& messages, std::vector<RankStep>& ranks);
  // After commit: which memory holds the average; it becomes `gradient`.
  std::span<const float> settle(std::size_t rank, std::span<float> average);

  std::string name_;
  std::vector<std::unique_ptr<Compressor>> compressors_;  // by rank, as the memories
  std::vector<Memories> memories_;
};

}  // namespace topknot
