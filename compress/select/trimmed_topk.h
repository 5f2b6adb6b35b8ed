#pragma once
// RedSync's trimming (Fang et al., JPDC 2019, as the code of Shi et al., arXiv 1911.08772, has it): t = mean +
// q (max - mean) of |u| with q = 0.8, 0.6, 0.4 and so on, until at least k exceed t; all of those are sent. The
// paper's trimmed top-k then selects the k largest of them exactly; that code does not, and we follow the code
// (compress.capacity: 1 gives the paper's).
//
// That code does not end where all magnitudes are equal. Here the search stops where max = mean, where q would
// fall below -1, where t would fall below 0 (the code would send every entry, zeros included), and where the
// magnitudes have no finite mean; the selection is exact then (topk). Where k asks for everything, everything
// is sent. Nothing is carried.

#include <vector>

#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/selector.h"

namespace topknot {

class TrimmedTopKSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;

  // The evaluations of the last select().
  struct Evaluation {
    double q = 0, threshold = 0;
    std::size_t count = 0;
  };
  const std::vector<Evaluation>& trace() const { return trace_; }
  bool exact() const { return exact_; }  // whether the search found nothing

 private:
  Candidates found_;
  ThresholdSearch search_;
  std::vector<Evaluation> trace_;
  bool exact_ = false;
};

}  // namespace topknot
