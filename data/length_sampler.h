#pragma once
// Training batches of samples of similar length, which take little padding, for a data set whose samples stand in ascending
// order of length. The ranks' batches of a step are neighbours in that order. The first epoch takes the steps in order,
// shortest first, as SortaGrad does (Deep Speech 2, section 3.2); later ones in an order given by (seed, epoch).

#include <cstdint>
#include <vector>

namespace topknot {

class LengthSampler {
 public:
  // UserError where the samples do not fill one step of all ranks.
  LengthSampler(std::int64_t size, int ranks, std::int64_t batch, std::uint64_t seed);

  // What does not fill a step is left out: samples drawn anew in each epoch.
  std::int64_t steps_per_epoch() const { return size_ / (ranks_ * batch_); }

  // The samples of an epoch, step by step, each step's in ascending order.
  std::vector<std::int64_t> epoch(std::int64_t number) const;
  // Rank `rank`'s samples of a step of such an epoch.
  std::vector<std::int64_t> batch(const std::vector<std::int64_t>& epoch, std::int64_t step, int rank) const;

 private:
  std::int64_t size_, ranks_, batch_;
  std::uint64_t seed_;
};

}  // namespace topknot
