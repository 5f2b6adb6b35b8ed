#include "compress/select/threshold.h"

#include <algorithm>

#include "compress/select/passes/take.h"
#include "compress/sparse_compressor.h"
#include "nn/core/base/check.h"

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

template <class T>
void ThresholdSelector<T>::select(std::span<T> u, const Addend<T>& addend, const SelectStep& step,
                                  Selected<T>& selected) {
  const Key<T> above = step.density >= 1 ? -1 : key_below<T>(threshold_);
  const std::size_t limit = above < 0 ? u.size() : 2 * last_count_ + 4096;
  accumulate_and_collect(u, addend, above, limit, found_);
  if (!begin_selection(found_.finite(), selected)) return;
  if (!found_.complete()) collect(std::span<const T>(u), above, u.size(), found_);
  last_count_ = found_.count();
  take_found(found_, selected);
  selected.threshold = above < 0 ? 0 : threshold_;
}

template class ThresholdSelector<float>;
template class ThresholdSelector<double>;

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
