#include "compress/select/threshold.h"

#include <algorithm>

#include "compress/select/passes/take.h"
#include "compress/sparse.h"
#include "nn/base/check.h"

namespace topknot {

namespace {

const Option kThreshold{.name = "threshold", .standard = 0.0, .help = "the fixed one", .least = 0};

}  // namespace

double fixed_threshold(const CompressOptions& options) {
  const double threshold = options.get<double>(kThreshold);
  if (!(threshold > 0))
    throw UserError(
        "compress.threshold is 0: selection `threshold` needs a number above 0; entries whose magnitude "
        "exceeds it "
        "are sent");
  return threshold;
}

void ThresholdSelector::select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
                               Selected& selected) {
  const MagnitudeKey above = step.density >= 1 ? -1 : key_below(threshold_);
  const std::size_t limit = above < 0 ? u.size() : 2 * last_count_ + 4096;
  accumulate_and_collect(u, input, above, limit, found_);
  if (!begin_selection(found_.finite(), selected)) return;
  if (!found_.complete()) collect(u, above, u.size(), found_);
  last_count_ = found_.count();
  take_found(found_, selected);
  selected.threshold = above < 0 ? 0 : threshold_;
}

namespace {

const bool threshold_registered = [] {
  add_selector<ThresholdSelector>("threshold", "the entries whose magnitude exceeds compress.threshold",
                                  {.check = [](const CompressOptions& options) { fixed_threshold(options); }},
                                  {kThreshold});
  add_sparse("threshold", "the entries above compress.threshold; error feedback keeps the rest",
             {.select = "threshold"});
  return true;
}();

}  // namespace
}  // namespace topknot
