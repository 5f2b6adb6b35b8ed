#pragma once
// Which samples a rank sees, in which order. Everything is a pure function of (seed, epoch, rank, step): no
// state is carried from step to step, so a resumed run goes straight to its step.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace topknot {

// How the training samples are dealt to the ranks (`data.shard`).
struct ShardRule {
  enum class Kind {
    even,      // equal shards; what does not divide is left out, other samples each epoch
    uneven,    // the first rank's shard is `ratio` times the last one's, geometric in between
    by_label,  // sorted by label and cut into one piece per rank: each rank sees few classes
  };
  Kind kind = Kind::even;
  double ratio = 1;  // uneven: 1 or more
  bool operator==(const ShardRule&) const = default;
};

// "even", "uneven:4", "by_label"; UserError (data.shard) for anything else.
ShardRule parse_shard_rule(const std::string& text);

// Training order. Each epoch the samples are permuted by (seed, epoch) and cut into the ranks' shards
// (by_label: sorted by label after that, and each shard shuffled). All ranks do the same number of steps,
// those that the largest shard fills; a smaller shard goes round again, in a new order each time.
class TrainSampler {
 public:
  // `size` samples; `labels` has one per sample and is read for by_label only. `batch` samples per rank and
  // step. UserError where a shard would be empty, or by_label has no labels.
  TrainSampler(std::int64_t size, std::vector<std::int32_t> labels, const ShardRule& rule, int ranks,
               std::int64_t batch, std::uint64_t seed);

  std::int64_t shard_size(int rank) const;
  // floor(largest shard / batch), at least 1.
  std::int64_t steps_per_epoch() const { return steps_; }
  // Aggregation weight of each rank: its shard over the mean shard, so that the mean weight is 1 and the
  // weighted average of the ranks' mean gradients counts each sample alike. All exactly 1 for even shards.
  std::vector<float> weights() const;

  // A rank's order within one epoch. Costs one pass over the samples to make, nothing to enter at any step.
  class Epoch {
   public:
    // The batch of `step`: `batch` sample indices, in order.
    std::vector<std::int64_t> batch(std::int64_t step) const;
    const std::vector<std::int64_t>& shard() const { return shard_; }  // the first round's order

   private:
    friend class TrainSampler;
    std::vector<std::int64_t> round_order(std::int64_t round) const;
    std::vector<std::int64_t> shard_;
    std::int64_t batch_ = 1;
    std::uint64_t seed_ = 0;
    std::uint32_t epoch_ = 0, rank_ = 0;
  };
  Epoch epoch(std::int64_t number, int rank) const;

 private:
  std::vector<std::int32_t> labels_;
  ShardRule rule_;
  std::vector<std::int64_t> starts_;  // ranks + 1 positions in the dealt order
  std::int64_t size_, batch_, steps_;
  std::uint64_t seed_;
};

// Evaluation: every sample once over all ranks, in the data set's order. Rank r has [begin(r), begin(r + 1)),
// which may be empty; its last batch may be short.
class EvalSampler {
 public:
  EvalSampler(std::int64_t size, int ranks, std::int64_t batch);
  std::int64_t shard_size(int rank) const { return begin(rank + 1) - begin(rank); }
  std::int64_t steps(int rank) const { return (shard_size(rank) + batch_ - 1) / batch_; }
  std::vector<std::int64_t> batch(int rank, std::int64_t step) const;

 private:
  std::int64_t begin(int rank) const { return size_ * rank / ranks_; }
  std::int64_t size_, ranks_, batch_;
};

// 0 .. n-1 in an order given by (seed, epoch): Fisher and Yates on counter-based numbers.
std::vector<std::int64_t> epoch_permutation(std::int64_t n, std::uint64_t seed, std::int64_t epoch);

}  // namespace topknot
