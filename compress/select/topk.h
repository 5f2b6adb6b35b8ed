#pragma once
// The k largest magnitudes, exactly; ties go to the lower index. Zeros count as entries, so exactly k are
// selected. Preset topk is TopK-SGD with error feedback: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory",
// NeurIPS 2018; operator as in Shi et al., arXiv 1911.08772.
//
// One pass in steady state: the k-th magnitude of the last step, lowered by a margin, is a bound above which
// the k largest of this step nearly always lie (compress/select/passes/carried_bound.h); the pass that adds the
// residual lists what exceeds it, and the k largest of the list are the answer. Fewer than k, or far too many:
// radix selection over the sum.

#include "compress/select/passes/carried_bound.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"

namespace topknot {

class TopKSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;
  void commit(const SelectOutcome& outcome) override;
  void discard() override;

  // Of the last select(): entries above the carried bound, and whether the answer had to come from radix
  // selection.
  std::size_t candidates() const { return candidates_; }
  bool fell_back() const { return fell_back_; }

  using Carried = CarriedBound;
  const Carried& carried() const { return carried_; }
  // Any state gives the same selections; tests use it.
  void set_carried(const Carried& carried) { carried_ = next_ = carried; }

 private:
  Carried carried_, next_;
  Candidates found_;
  std::size_t candidates_ = 0;
  bool fell_back_ = false;
};

}  // namespace topknot
