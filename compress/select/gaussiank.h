#pragma once
// GaussianK-SGD's rule (Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep
// Learning", arXiv 1911.08772, as their code has it): fit a normal distribution to u, take t = mean + z std
// with z the quantile of density / 2, and accept |u| > t, with t halved where fewer than 2k/3 are selected
// and multiplied by 1.5 where more than 4k/3 are; at most three evaluations, of which the last counts. How
// many are selected is not bounded: the rule often selects a tenth or ten times of k. A vector of zeros
// selects nothing. Fewer than 2048 elements, or a constant vector, where a normal fit means nothing, are
// selected exactly (topk).
//
// Two passes in steady state: the first adds the residual and takes the moments, the second counts the
// thresholds that the rule asked for last step and lists the entries above the one it ended at; where it asks
// for others, or ends at another one, a further pass counts, or lists, those.

#include <array>
#include <vector>

#include "compress/select/topk.h"

namespace topknot {

template <class T>
class GaussianKSelector final : public Selector<T> {
 public:
  void select(std::span<T> u, std::span<const T> addend, const SelectStep& step,
              Selected<T>& selected) override;
  void commit(const SelectOutcome<T>& outcome) override;
  void discard() override;

  // The evaluations of the last select(); empty where the selection was exact.
  struct Evaluation {
    double threshold = 0;
    std::size_t count = 0;
  };
  const std::vector<Evaluation>& trace() const { return trace_; }
  int carried_level() const { return carried_.last; }

 private:
  TopKSelector<T> exact_;
  Candidates<T> found_;
  std::vector<Evaluation> trace_;
  // Which of the reachable thresholds the last step asked for, and which it ended at.
  struct Path {
    std::array<int, kCounts> path = {0, 2, 1};
    int last = 0;
  };
  Path carried_, next_;
  double z_ = 0, z_density_ = -1;
};

}  // namespace topknot
