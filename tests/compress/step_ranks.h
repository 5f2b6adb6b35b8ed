#pragma once
// Ranks in one thread over SparseStep, in float or double: what is sent arrives as it is.

#include <memory>
#include <vector>

#include "compress/sparse_step.h"
#include "tests/compress/simulated_ranks.h"

namespace topknot::testing {

template <class T>
class StepRanks {
 public:
  struct Rank {
    std::unique_ptr<SparseStep<T>> step;
    std::vector<T> gradient, residual;  // the residual is the spare memory
    std::vector<std::uint32_t> rejected;
  };

  StepRanks(const CompressOptions& options, std::size_t numel, int ranks) {
    for (int r = 0; r < ranks; ++r)
      ranks_.push_back({std::make_unique<SparseStep<T>>(resolve(sparse_presets().find(options.name), options),
                                                        options, whole_group(numel, ranks)),
                        std::vector<T>(numel),
                        std::vector<T>(numel),
                        {}});
  }

  Rank& operator[](std::size_t r) { return ranks_[r]; }
  std::size_t size() const { return ranks_.size(); }

  // The gradients are in place; returns the average, the same on all ranks, and keeps what was sent in sent().
  std::vector<T> step(std::int64_t number, double density, const std::vector<float>& weights = {}) {
    sent_.clear();
    for (std::size_t r = 0; r < size(); ++r) {
      StepInfo info;
      info.step = number;
      info.density = density;
      info.weights = weights;
      info.rank = static_cast<int>(r);
      sent_.push_back(ranks_[r].step->encode(ranks_[r].gradient, ranks_[r].residual, info));
    }
    std::vector<T> result;
    for (Rank& rank : ranks_) {
      const std::span<T> average = rank.step->commit(sent_, {rank.rejected});
      if (average.data() == rank.residual.data()) std::swap(rank.gradient, rank.residual);
      if (result.empty()) result = rank.gradient;
      TOPKNOT_CHECK(same_bits(result, rank.gradient), "ranks with different averages");
    }
    return result;
  }

  const std::vector<Entries<T>>& sent() const { return sent_; }

 private:
  std::vector<Rank> ranks_;
  std::vector<Entries<T>> sent_;
};

}  // namespace topknot::testing
