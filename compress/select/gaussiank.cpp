#include "compress/select/gaussiank.h"

#include <algorithm>
#include <array>

#include "compress/select/gaussiank_rule.h"
#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/passes/take.h"
#include "compress/sparse.h"
#include "nn/base/check.h"

namespace topknot {

using gaussiank::kLevels, gaussiank::too_many, gaussiank::Way;

void GaussianKSelector::select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
                               Selected& selected) {
  trace_.clear();
  next_ = carried_;
  if (gaussiank::too_small(step.k, u.size())) return exact_.select(u, input, step, selected);

  const std::size_t k = step.k, limit = 16 * k + 4096;
  const MagnitudeKey bound = carried_.above(false);
  const Moments fit = accumulate_with_moments(u, input, bound, limit, found_);
  const bool dropped = !found_.complete();
  passes_ = 1;
  begin_selection(fit.finite, selected);
  const Way way = gaussiank::way_of(fit.finite, fit.zero, k, u.size(), fit);
  if (way == Way::nothing) return;
  if (way == Way::exact) return exact_.select(u, {}, step, selected);

  if (step.density != z_density_) {
    z_ = -normal_quantile(step.density / 2);
    z_density_ = step.density;
  }
  const gaussiank::Thresholds t = gaussiank::thresholds_from(fit.mean + z_ * fit.deviation);
  std::array<MagnitudeKey, kLevels> above;
  std::transform(t.level, t.level + kLevels, above.begin(), key_below);

  MagnitudeKey listed = bound, least = kLargestFinite;
  last_level_ = gaussiank::last_level(k, [&](int, int level) {
    const MagnitudeKey key = above[static_cast<std::size_t>(level)];
    least = std::min(least, key);
    std::size_t count = found_.complete() ? found_.count() : 0;
    if (found_.complete() && key >= listed) {
      count = count_listed(found_, key);
    } else if (!too_many(count, k)) {
      collect(u, key, limit, found_);
      listed = key;
      count = found_.complete() ? found_.count() : count_above(u, key);
      passes_ += 1 + !found_.complete();
    }
    trace_.push_back({t.level[level], count});
    return count;
  });
  const MagnitudeKey last = above[static_cast<std::size_t>(last_level_)];
  if (!found_.complete() || last < listed) {
    collect(u, last, u.size(), found_);
    listed = last;
    ++passes_;
  }
  take_listed(found_, last, count_listed(found_, last), selected);
  selected.threshold = t.level[last_level_];

  // A lower threshold that was looked at needs more than 4k/3 entries to tell.
  const std::size_t telling = std::min(found_.count(), 3 * k / 2);
  const MagnitudeKey needed =
      least < last && telling > selected.indices.size() ? kth_key(found_, listed, telling) : last;
  next_ = carried_.after(std::min(last, needed), passes_ == 1 ? ListState::good
                                                 : dropped    ? ListState::too_many
                                                              : ListState::too_few);
}

void GaussianKSelector::commit(const SelectOutcome& outcome) {
  carried_ = next_;
  exact_.commit(outcome);
}

void GaussianKSelector::discard() {
  next_ = carried_;
  exact_.discard();
}

namespace {

const bool gaussiank_registered = [] {
  add_selector<GaussianKSelector>("gaussiank",
                                  "about k entries, above a threshold from a fitted normal distribution");
  add_sparse("gaussiank",
             "about k entries above a fitted threshold, without a search; error feedback keeps the rest",
             {.select = "gaussiank"});
  return true;
}();

}  // namespace
}  // namespace topknot
