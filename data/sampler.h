#pragma once
// Which samples a rank takes, in which order. Everything is a pure function of (seed, epoch, rank, step): no
// state is carried from step to step, so a resumed run goes straight to its step.

#include <algorithm>
#include <cstdint>
#include <functional>
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

// 0 .. n-1 in an order given by (seed, epoch): Fisher and Yates on counter-based numbers.
std::vector<std::int64_t> epoch_permutation(std::int64_t n, std::uint64_t seed, std::int64_t epoch);

// What a start of the run, of so many ranks, has taken of an epoch that a later one with other ranks ends.
struct Dealt {
  int ranks = 1;
  std::int64_t batches = 0;  // of each of them
};

// A rank's batches of an epoch: the samples of `step`, in order. For any thread; its sampler must outlive it.
using EpochOrder = std::function<std::vector<std::int64_t>(std::int64_t step)>;

class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual std::int64_t steps(int rank) const = 0;  // batches of an epoch; when training, equal on all ranks
  virtual std::int64_t shard_size(int rank) const = 0;  // a rank's samples
  // Aggregation weight of each rank, so that the mean weight is 1.
  virtual std::vector<float> weights() const {
    return std::vector<float>(static_cast<std::size_t>(ranks_), 1.0f);
  }
  // Batches of an optimizer step, where `accumulate` are asked for; and how much the mean of batch `part` of the `count`
  // of a step weighs in the rank's mean.
  virtual int batches_per_step(int accumulate) const { return accumulate; }
  virtual float share(int /*rank*/, int /*part*/, int count) const {
    return 1.0f / static_cast<float>(count);
  }
  // May cost a pass over the samples; nothing to enter at any step.
  virtual EpochOrder epoch(std::int64_t number, int rank) const = 0;
  // Returns how many batches of an epoch, its last ones, are left for each rank. Here by number alone.
  virtual std::int64_t enter(std::int64_t /*number*/, const std::vector<Dealt>& dealt) {
    std::int64_t taken = 0;  // batches of all ranks
    for (const Dealt& part : dealt) taken += part.ranks * part.batches;
    return std::max<std::int64_t>(0, steps(0) - (taken + ranks_ - 1) / ranks_);
  }

 protected:
  // UserError if `batch` is not at least 1.
  Sampler(int ranks, std::int64_t batch);
  std::int64_t ranks_, batch_;
};

// Training order. Each epoch the samples are permuted by (seed, epoch) and cut into the ranks' shards
// (by_label: sorted by label after that, and each shard shuffled). All ranks do the same number of steps,
// those that the largest shard fills; a smaller shard goes round again, in a new order each time. Even shards of an
// epoch that another number of ranks began are cut of the samples that these have left, so that none is taken twice.
class TrainSampler final : public Sampler {
 public:
  // `size` samples; `labels` has one per sample and is read for by_label only. `batch` samples per rank and
  // step. UserError if a shard would be empty, or by_label has no labels.
  TrainSampler(std::int64_t size, std::vector<std::int32_t> labels, const ShardRule& rule, int ranks,
               std::int64_t batch, std::uint64_t seed);

  // floor(largest shard / batch), at least 1.
  std::int64_t steps(int /*rank*/) const override { return steps_; }
  std::int64_t shard_size(int rank) const override {
    const auto r = static_cast<std::size_t>(rank);
    return starts_[r + 1] - starts_[r];
  }
  // A shard over the mean shard, so that an average counts samples alike. All exactly 1 for even shards.
  std::vector<float> weights() const override;
  EpochOrder epoch(std::int64_t number, int rank) const override;
  std::int64_t enter(std::int64_t number, const std::vector<Dealt>& dealt) override;
  // A rank's samples in the order of the first round.
  std::vector<std::int64_t> shard(std::int64_t epoch, int rank) const;

 private:
  std::vector<std::int64_t> round_order(std::vector<std::int64_t> shard, std::int64_t epoch, int rank,
                                        std::int64_t round) const;

  std::vector<std::int32_t> labels_;
  ShardRule rule_;
  std::vector<std::int64_t> starts_;  // ranks + 1 positions in the dealt order
  std::int64_t size_, steps_;
  std::uint64_t seed_;
  std::int64_t entered_ = -1;       // the epoch of which only left_ is left
  std::vector<std::int64_t> left_;  // in order
};

// The weights of ranks that share steps of `size` samples.
std::vector<float> global_batch_weights(std::int64_t size, int ranks);

// Training steps of `size` samples, the same for any number of ranks, which take them in order and as evenly as it goes:
// of an elastic run. They are those of an epoch's permutation, or windows of a text as RandomWindowSampler draws them.
class GlobalBatchSampler final : public Sampler {
 public:
  // Batches of at most `batch` samples, but one at least for each rank. `samples`: of an epoch; `starts`: 0, or where a
  // window can begin. UserError if the samples do not fill a step, or a step has fewer than ranks.
  GlobalBatchSampler(std::int64_t samples, std::int64_t starts, std::int64_t size, int ranks,
                     std::int64_t batch, std::uint64_t seed);

  std::int64_t steps(int /*rank*/) const override { return samples_ / size_ * batches_; }
  std::int64_t shard_size(int rank) const override {
    return samples_ / size_ * (begin(rank + 1) - begin(rank));
  }
  std::vector<float> weights() const override {
    return global_batch_weights(size_, static_cast<int>(ranks_));
  }
  int batches_per_step(int /*accumulate*/) const override { return static_cast<int>(batches_); }
  float share(int rank, int part, int count) const override;
  EpochOrder epoch(std::int64_t number, int rank) const override;
  // Dealt::batches are samples here.
  std::int64_t enter(std::int64_t number, const std::vector<Dealt>& dealt) override;

 private:
  std::int64_t begin(int rank) const {
    return size_ * rank / ranks_;
  }  // in a step; as global_batch_weights()
  std::int64_t begin(int rank, std::int64_t part) const {
    return begin(rank) + (begin(rank + 1) - begin(rank)) * part / batches_;
  }

  std::int64_t samples_, starts_, size_, batches_;
  std::uint64_t seed_;
};

// Evaluation: every sample once over all ranks, in the data set's order. Rank r has [begin(r), begin(r + 1)),
// which may be empty; its last batch may be short.
class EvalSampler final : public Sampler {
 public:
  EvalSampler(std::int64_t size, int ranks, std::int64_t batch) : Sampler(ranks, batch), size_(size) {}
  std::int64_t steps(int rank) const override { return (shard_size(rank) + batch_ - 1) / batch_; }
  std::int64_t shard_size(int rank) const override { return begin(rank + 1) - begin(rank); }
  EpochOrder epoch(std::int64_t number, int rank) const override;

 private:
  std::int64_t begin(int rank) const { return size_ * rank / ranks_; }
  std::int64_t size_;
};

// Training batches of samples of similar length, which take little padding, for a data set whose samples
// stand in ascending order of length. The ranks' batches of a step are neighbours in that order. The first
// epoch takes the steps in order, shortest first, as SortaGrad does (Deep Speech 2, section 3.2); later ones
// in an order given by (seed, epoch).
class LengthSampler final : public Sampler {
 public:
  // UserError if the samples do not fill one step of all ranks.
  LengthSampler(std::int64_t size, int ranks, std::int64_t batch, std::uint64_t seed);

  // Samples that do not fill a step are left out; they are drawn anew in each epoch.
  std::int64_t steps(int /*rank*/) const override { return size_ / (ranks_ * batch_); }
  std::int64_t shard_size(int rank) const override { return steps(rank) * batch_; }
  EpochOrder epoch(std::int64_t number, int rank) const override;
  // All ranks' samples of an epoch, step by step, each step's in ascending order.
  std::vector<std::int64_t> samples(std::int64_t epoch) const;

 private:
  std::int64_t size_;
  std::uint64_t seed_;
};

// Windows of a token stream for recurrent models, as Zaremba, Sutskever, Vinyals (arXiv 1409.2329) lay them
// out: the stream is cut into columns. Row i of a rank's batches goes down one column, a window of tokens per
// step, so that the state carried from batch to batch is that of the text before the window. A sample is a
// window's first token.
class StreamSampler final : public Sampler {
 public:
  // A stream of `tokens` in windows of `window`, in which every token but the last is followed by one to
  // predict. Training: `batch` columns per rank, all of one length; what does not fill a window in each of
  // them is left out. Evaluation: `batch` columns over all ranks (one per rank if there are more ranks), so
  // that the result does not depend on their number. They differ by a window at most, longer ones first; the
  // last window may reach beyond the stream's end. UserError if a training column has no window.
  StreamSampler(std::int64_t tokens, std::int64_t window, int ranks, std::int64_t batch, bool train);

  // In an evaluation ranks differ by one at most.
  std::int64_t steps(int rank) const override {
    return first_column(rank) < first_column(rank + 1) ? length(first_column(rank)) : 0;
  }
  // The windows in all of its columns.
  std::int64_t shard_size(int rank) const override {
    std::int64_t sum = 0;
    for (std::int64_t c = first_column(rank); c < first_column(rank + 1); ++c) sum += length(c);
    return sum;
  }
  // In evaluation the last batch has the rows of the longer columns only. The same in every epoch.
  EpochOrder epoch(std::int64_t number, int rank) const override;

 private:
  std::int64_t first_column(int rank) const { return columns_ * rank / ranks_; }
  // Windows in column c, and the stream's first token in it.
  std::int64_t length(std::int64_t c) const {
    return windows_ / columns_ + (c < windows_ % columns_ ? 1 : 0);
  }
  std::int64_t begin(std::int64_t c) const {
    if (stride_ > 0) return c * stride_;
    return (windows_ / columns_ * c + std::min(c, windows_ % columns_)) * window_;
  }

  std::int64_t window_, columns_;
  std::int64_t stride_ = 0;   // training: tokens of a column
  std::int64_t windows_ = 0;  // over all columns
};

// Training windows of a token stream for models without a state: each row of each batch begins at a token
// drawn uniformly from [0, starts), with replacement, by (seed, epoch, step, rank, row), as nanoGPT's
// get_batch() draws them (train.py). Ranks draw from the whole stream. An epoch has no meaning of its own: it
// is so many batches that their windows have as many tokens as the stream, a multiple of `multiple`.
class RandomWindowSampler final : public Sampler {
 public:
  // `starts`: tokens that can begin a window with a token after it, at least 1.
  RandomWindowSampler(std::int64_t starts, std::int64_t window, int ranks, std::int64_t batch,
                      std::uint64_t seed, std::int64_t multiple = 1);

  std::int64_t steps(int /*rank*/) const override { return steps_; }
  std::int64_t shard_size(int /*rank*/) const override { return steps_ * batch_; }
  EpochOrder epoch(std::int64_t number, int rank) const override;

 private:
  std::int64_t starts_, steps_;
  std::uint64_t seed_;
};

}  // namespace topknot
