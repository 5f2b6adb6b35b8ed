// RedSync's threshold search (Fang, Fu, Yang, Hsieh, "RedSync: reducing synchronization bandwidth for
// distributed deep learning training system", JPDC 2019, as the code of Shi et al., arXiv 1911.08772, has
// it): t = mean + q (max - mean) of |u|, and q halves the interval [0, 1] until it is at most 0.2 wide: down
// where fewer than k/2 exceed t, up otherwise; it stops early where more than k and fewer than 2k do. At most
// three evaluations, and the last one's entries are sent, however many they are: usually fewer than k,
// sometimes many more. Preset redsync adds error feedback.
//
// A vector of one magnitude (max = mean: no t between them) is selected exactly (topk), as are magnitudes
// without a finite mean. If k is everything, all is sent. Nothing is carried.
//
// Usually two passes: the residual, mean and max; then the entries above t. Each lower t takes another one.

#include <vector>

#include "compress/select/passes/keys.h"
#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"

namespace topknot {
namespace {

class RedSyncSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
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
      trace_.push_back({t, count});
      const double n = static_cast<double>(count);
      if (n > k && 2 * k > n) break;
      (n < k / 2 ? high : low) = q;
    }
    search_.take(key_below(trace_.back().threshold), trace_.back().count, selected);
    selected.threshold = trace_.back().threshold;
  }

  SelectDiagnostics diagnostics() const override { return {.trace = trace_}; }

 private:
  Candidates found_;
  ThresholdSearch search_;
  std::vector<SelectDiagnostics::Evaluation> trace_;  // empty if the selection was exact
};

const bool redsync_registered[] = {
    add_selector<RedSyncSelector>("redsync",
                                  "about k entries, above a threshold searched between mean and maximum"),
    add_sparse("redsync", "about k entries above a searched threshold; error feedback keeps the rest",
               {.select = "redsync",
                .settings = {{"compress.density", "0.001"},
                             {"compress.warmup", "[0.015625, 0.004]"},
                             {"compress.dense_1d", "false"}}})};

}  // namespace
}  // namespace topknot
