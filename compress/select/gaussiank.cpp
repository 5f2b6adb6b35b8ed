// GaussianK-SGD's rule (Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep
// Learning", arXiv 1911.08772, as their code has it): fit a normal distribution to u, take t = mean + z std
// with z the quantile of density / 2, and accept |u| > t, with t halved where fewer than 2k/3 are selected
// and multiplied by 1.5 if more than 4k/3 are; at most three evaluations, of which the last counts. How many
// are selected is not bounded: the rule often selects a tenth or ten times of k. A vector of zeros selects
// nothing. Fewer than 2048 elements, or a constant vector, are selected exactly (topk).
//
// One pass in steady state: it adds the residual, takes the moments, and lists what exceeds a bound from the
// last step, below the threshold where the rule ended and below enough entries to tell that lower thresholds
// let too many through. A further pass lists what this list cannot tell.

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "compress/select/gaussiank_rule.h"
#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/passes/passes.h"
#include "compress/sparse.h"

namespace topknot {
namespace {

using gaussiank::kLevels, gaussiank::too_many, gaussiank::Way;

class GaussianKSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    trace_.clear();
    next_ = carried_;
    if (gaussiank::too_small(step.k, u.size())) return exact_->select(u, input, step, selected);

    const std::size_t k = step.k, limit = 16 * k + 4096;
    const MagnitudeKey bound = carried_.above(false);
    const Moments fit = accumulate_with_moments(u, input, bound, limit, found_);
    const bool dropped = !found_.complete();
    passes_ = 1;
    begin_selection(fit.finite, selected);
    const Way way = gaussiank::way_of(fit.finite, fit.zero, k, u.size(), fit);
    if (way == Way::nothing) return;
    if (way == Way::exact) return exact_->select(u, {}, step, selected);

    if (step.density != z_density_) {
      z_ = -normal_quantile(step.density / 2);
      z_density_ = step.density;
    }
    const gaussiank::Thresholds t = gaussiank::thresholds_from(fit.mean + z_ * fit.deviation);
    std::array<MagnitudeKey, kLevels> above;
    std::transform(t.level, t.level + kLevels, above.begin(), key_below);

    MagnitudeKey listed = bound, least = kLargestFinite;
    const int last_level = gaussiank::last_level(k, [&](int, int level) {
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
    const MagnitudeKey last = above[static_cast<std::size_t>(last_level)];
    if (!found_.complete() || last < listed) {
      collect(u, last, u.size(), found_);
      listed = last;
      ++passes_;
    }
    take_listed(found_, last, count_listed(found_, last), selected);
    selected.threshold = t.level[last_level];

    // A lower threshold that was looked at needs more than 4k/3 entries to tell.
    const std::size_t telling = std::min(found_.count(), 3 * k / 2);
    const MagnitudeKey needed =
        least < last && telling > selected.indices.size() ? kth_key(found_, listed, telling) : last;
    next_ = carried_.after(std::min(last, needed), passes_ == 1 ? ListState::good
                                                   : dropped    ? ListState::too_many
                                                                : ListState::too_few);
  }

  void commit(const SelectOutcome& outcome) override {
    carried_ = next_;
    exact_->commit(outcome);
  }

  void discard() override {
    next_ = carried_;
    exact_->discard();
  }

  SelectDiagnostics diagnostics() const override {
    return {.trace = trace_, .passes = passes_, .carried = carried_};
  }

 private:
  std::unique_ptr<Selector> exact_ = make_selector("topk");
  Candidates found_;
  // The thresholds that the last select() tried; none if it was exact. Too great counts may be cut short.
  std::vector<SelectDiagnostics::Evaluation> trace_;
  CarriedBound carried_, next_;
  int passes_ = 0;
  double z_ = 0, z_density_ = -1;
};

const bool gaussiank_registered[] = {
    add_selector<GaussianKSelector>("gaussiank",
                                    "about k entries, above a threshold from a fitted normal distribution"),
    add_sparse("gaussiank",
               "about k entries above a fitted threshold, without a search; error feedback keeps the rest",
               {.select = "gaussiank",
                .settings = {{"compress.density", "0.001"},
                             {"compress.warmup", "[0.015625, 0.004]"},
                             {"compress.dense_1d", "false"}}})};

}  // namespace
}  // namespace topknot
