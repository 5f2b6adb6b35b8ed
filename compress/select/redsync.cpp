#include "compress/select/redsync.h"

#include "compress/select/passes/carried_bound.h"
#include "compress/select/passes/take.h"
#include "compress/sparse.h"
#include "nn/base/check.h"

namespace topknot {

void RedSyncSelector::select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
                             Selected& selected) {
  TOPKNOT_CHECK(step.k >= 1 && step.k <= u.size(), "k outside 1 to the vector's length");
  trace_.clear();
  const MagnitudeMoments all = accumulate_with_magnitudes(u, input);
  if (!begin_selection(all.finite, selected)) return;
  if (step.k == u.size() || all.constant()) {
    selected.threshold = magnitude_of(select_exact(u, step.k, found_, selected));
    return;
  }

  search_.start(u, list_limit(step.k));
  const double k = static_cast<double>(step.k);
  double low = 0, high = 1;
  while (high - low > 0.2) {
    const double q = low + (high - low) / 2, t = all.mean + q * (all.largest - all.mean);
    const std::size_t count = search_.count(key_below(t));
    trace_.push_back({q, t, count});
    const double n = static_cast<double>(count);
    if (n > k && 2 * k > n) break;
    (n < k / 2 ? high : low) = q;
  }
  search_.take(key_below(trace_.back().threshold), trace_.back().count, selected);
  selected.threshold = trace_.back().threshold;
}

namespace {

const bool redsync_registered = [] {
  add_selector<RedSyncSelector>("redsync",
                                "about k entries, above a threshold searched between mean and maximum");
  add_sparse("redsync", "about k entries above a searched threshold; error feedback keeps the rest",
             {.select = "redsync"});
  return true;
}();

}  // namespace
}  // namespace topknot
