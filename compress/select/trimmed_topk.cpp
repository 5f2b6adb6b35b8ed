#include "compress/select/trimmed_topk.h"

#include "compress/select/passes/carried_bound.h"
#include "compress/select/passes/take.h"
#include "compress/sparse.h"
#include "nn/base/check.h"

namespace topknot {

void TrimmedTopKSelector::select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
                                 Selected& selected) {
  TOPKNOT_CHECK(step.k >= 1 && step.k <= u.size(), "k outside 1 to the vector's length");
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
      trace_.push_back({q, t, count});
      if (count < step.k) continue;
      search_.take(key_below(t), count, selected);
      selected.threshold = t;
      return;
    }
  }
  exact_ = true;
  selected.threshold = magnitude_of(select_exact(u, step.k, found_, selected));
}

namespace {

const bool trimmed_topk_registered = [] {
  add_selector<TrimmedTopKSelector>(
      "trimmed_topk", "at least k entries, above a threshold lowered from near the maximum in steps");
  add_sparse("trimmed_topk", "at least k entries above a trimming threshold; error feedback keeps the rest",
             {.select = "trimmed_topk"});
  return true;
}();

}  // namespace
}  // namespace topknot
