// RedSync's trimming (Fang et al., JPDC 2019, as the code of Shi et al., arXiv 1911.08772, has it): t = mean
// + q (max - mean) of |u| with q = 0.8, 0.6, 0.4 and so on, until at least k exceed t; all of those are sent.
// The paper then selects the k largest of them; we follow the code (compress.capacity: 1 gives the paper's).
//
// That code does not end if all magnitudes are equal. Here the search stops where max = mean, where q would
// fall below -1, where t would fall below 0 (the code would send every entry, zeros included), and where the
// magnitudes have no finite mean; the selection is exact then (topk). Nothing is carried.

#include <vector>

#include "compress/select/passes/keys.h"
#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"

namespace topknot {
namespace {

class TrimmedTopKSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    trace_.clear();
    exact_ = false;
    const MagnitudeMoments all = accumulate_with_magnitudes(u, input);
    if (!begin_selection(all.finite, selected)) return;
    if (step.k < u.size() && !all.constant()) {
      search_.start(u, list_limit(step.k));
      for (double q = 0.8; q >= -1; q -= 0.2) {
        const double t = all.mean + q * (all.largest - all.mean);
        if (t < 0) break;
        const std::size_t count = search_.count(key_below(t));
        trace_.push_back({t, count});
        if (count < step.k) continue;
        search_.take(key_below(t), count, selected);
        selected.threshold = t;
        return;
      }
    }
    exact_ = true;
    selected.threshold = magnitude_of(select_exact(u, step.k, found_, selected));
  }

  SelectDiagnostics diagnostics() const override { return {.trace = trace_, .exact = exact_}; }

 private:
  Candidates found_;
  ThresholdSearch search_;
  std::vector<SelectDiagnostics::Evaluation> trace_;
  bool exact_ = false;  // the search found nothing
};

const bool trimmed_topk_registered[] = {
    add_selector<TrimmedTopKSelector>(
        "trimmed_topk", "at least k entries, above a threshold lowered from near the maximum in steps"),
    add_sparse("trimmed_topk", "at least k entries above a trimming threshold; error feedback keeps the rest",
               {.select = "trimmed_topk",
                .settings = {{"compress.density", "0.001"},
                             {"compress.warmup", "[0.015625, 0.004]"},
                             {"compress.dense_1d", "false"}}})};

}  // namespace
}  // namespace topknot
