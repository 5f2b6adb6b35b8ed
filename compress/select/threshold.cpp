// A fixed threshold: |u| > compress.threshold is sent. Strom, "Scalable distributed DNN training using
// commodity GPU cloud computing", Interspeech 2015, without its quantisation of what is sent; Dutta et al.,
// "On the discrepancy between the theoretical analysis and practical implementations of compressed
// communication for distributed deep learning", AAAI 2020 ("hard threshold"). compress.density asks for
// nothing here, but for 1, at which everything is sent. compress.capacity alone bounds how many.
//
// One pass, and a second one if far more than last time exceed the threshold. No result depends on the past.

#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

const Option kThreshold{"threshold", 0.0, "the fixed one", 0};

class ThresholdSelector final : public Selector {
 public:
  explicit ThresholdSelector(const CompressOptions& options) : threshold_(fixed_threshold(options)) {}

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    const MagnitudeKey above = step.density >= 1 ? -1 : key_below(threshold_);
    const std::size_t limit = above < 0 ? u.size() : 2 * last_count_ + 4096;
    accumulate_and_collect(u, input, above, limit, found_);
    if (!begin_selection(found_.finite(), selected)) return;
    if (!found_.complete()) collect(u, above, u.size(), found_);
    last_count_ = found_.count();
    take_found(found_, selected);
    selected.threshold = above < 0 ? 0 : threshold_;
  }

 private:
  double threshold_;
  Candidates found_;
  std::size_t last_count_ = 0;  // how much room the list gets
};

const bool threshold_registered[] = {
    add_selector<ThresholdSelector>(
        "threshold", "the entries whose magnitude exceeds compress.threshold",
        {.check = [](const CompressOptions& options) { fixed_threshold(options); }}, {kThreshold}),
    add_sparse("threshold", "the entries above compress.threshold; error feedback keeps the rest",
               {.select = "threshold"})};

}  // namespace

double fixed_threshold(const CompressOptions& options) {
  const double threshold = options.get<double>(kThreshold);
  if (!(threshold > 0))
    throw UserError(
        "compress.threshold is 0: selection `threshold` needs a number above 0; entries whose magnitude "
        "exceeds it are sent");
  return threshold;
}

}  // namespace topknot
