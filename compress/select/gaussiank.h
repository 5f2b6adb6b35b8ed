#pragma once
// GaussianK-SGD's rule (Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep
// Learning", arXiv 1911.08772, as their code has it): fit a normal distribution to u, take t = mean + z std
// with z the quantile of density / 2, and accept |u| > t, with t halved where fewer than 2k/3 are selected
// and multiplied by 1.5 where more than 4k/3 are; at most three evaluations, of which the last counts. How
// many are selected is not bounded: the rule often selects a tenth or ten times of k. A vector of zeros
// selects nothing. Fewer than 2048 elements, or a constant vector, where a normal fit means nothing, are
// selected exactly (topk).
//
// One pass in steady state: it adds the residual, takes the moments, and lists what exceeds a bound from the last step,
// below the threshold where the rule ended and below enough entries to tell that lower thresholds let too many through. A
// further pass lists what this list cannot tell.

#include <vector>

#include "compress/select/topk.h"

namespace topknot {

class GaussianKSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;
  void commit(const SelectOutcome& outcome) override;
  void discard() override;

  // The evaluations of the last select(); empty where the selection was exact. A count that is too many may be less than
  // exceed the threshold.
  struct Evaluation {
    double threshold = 0;
    std::size_t count = 0;
  };
  const std::vector<Evaluation>& trace() const { return trace_; }
  // Of the last select() by the rule: which of its thresholds (compress/select/gaussiank_rule.h) it ended at, and how many
  // times it went over the vector.
  int last_level() const { return last_level_; }
  int passes() const { return passes_; }
  const CarriedBound& carried() const { return carried_; }

 private:
  TopKSelector exact_;
  Candidates found_;
  std::vector<Evaluation> trace_;
  CarriedBound carried_, next_;
  int last_level_ = 0, passes_ = 0;
  double z_ = 0, z_density_ = -1;
};

}  // namespace topknot
