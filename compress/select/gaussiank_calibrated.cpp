// Selection by a fitted threshold, as in GaussianK-SGD (Shi et al., arXiv 1911.08772), but calibrated on what
// the last step saw, so that one pass is enough and the count is within 8 % of k. Our own method.
//
// The difference from gaussiank, and its reason: GaussianK takes mean and deviation of the whole of u and
// reads the threshold off the normal distribution: t = mean + z(k/d) * deviation, with z(p) the two-sided
// quantile. Under error feedback that fails: everything above the last threshold has left, so u piles up just
// below it, its tail falls far faster than that of a normal distribution with u's deviation, and the rule is
// off by a factor of ten or more (three tries of halving and of half as much again cannot fix that). Here the
// normal tail is fitted where it is needed. With N(x) = #{|u| > x}, the model is
//     N(x) = d * P(|Z| > (x / scale)^power),  Z standard normal,
// so that of two thresholds  x2 = x1 * (z(N2/d) / z(N1/d))^(1/power).  The scale is known from one count
// above one threshold, the power (1 in GaussianK; 1 to 10 under error feedback) is learnt from pairs of
// counts. Neither needs the moments, and both carry from step to step:
//  1. The threshold of the last committed step and its count give a bound for this step, meant to be exceeded
//     by m * k entries. One pass adds the residual and lists what exceeds the bound. How much longer lists
//     have been than predicted (u grows in the first steps) is allowed for; m is 1 if they came as predicted,
//     and more by three standard deviations of what they fell short.
//  2. A list within 8 % of k is sent whole. A longer one is cut at the fitted threshold of k; the cut is
//     counted, and the fit repeated between the counts known by then, three evaluations at most; then, as for
//     ties, the k largest of the list are sent. Only the list is read, never u.
//  3. A list that is too short asks for a second pass with a bound for 2k entries, and for a third one. What
//     is left, the first step, and lists above 8k + 4096 entries (of a density that falls: of the old k) are
//     selected exactly over u, ties to the lower index.
//
// Zeros are never sent, unless k is all of u: of less than k other entries, those are sent. Equal magnitudes
// that cannot be told apart by a threshold: exactly k, the lower indices first. Fewer than 2048 elements, and
// densities above 1/2, are selected exactly, zeros included, as topk does. The count and the selection do not
// depend on the number of threads; they do on what is carried, which is saved and changes at commit.

#include <algorithm>
#include <cmath>
#include <memory>

#include "compress/select/passes/passes.h"
#include "compress/select/passes/quantiles.h"
#include "compress/sparse.h"
#include "compress/state.h"

namespace topknot {
namespace {

constexpr std::size_t kSmallestFit = 2048;  // elements below which counts say too little
constexpr double kBand = 0.08;              // how far from k a count may be, relatively
constexpr int kEvaluations = 3, kMorePasses = 2;
constexpr double kLeastPower = 0.25, kLargestPower = 64;
constexpr double kForget = 0.1;     // weight of the newest error in the variance
constexpr double kLearnBias = 0.3;  // and in the bias
constexpr double kLargestBias = 2, kLargestVariance = 1;
constexpr double kLearnPower = 0.2;  // weight of the newest power, in the logarithm

// The counts that will do for k, as real numbers; k itself always does.
double fewest(double k) {
  return std::ceil((1 - kBand) * k);
}
double most(double k) {
  return std::floor((1 + kBand) * k);
}

double log_quantile(double count, double d) {
  return std::log(-normal_quantile(std::clamp(count / d, 1e-12, 0.99) / 2));
}

// The threshold that `count` entries should exceed, by the model, from one that `known` entries exceed.
double fitted(double threshold, double known, double count, double d, double power) {
  return threshold * std::exp((log_quantile(count, d) - log_quantile(known, d)) / power);
}

// The entries that should exceed `threshold`, by the model, if `count` exceed `at`.
double modelled(double threshold, double at, double count, double d, double power) {
  const double z = std::exp(log_quantile(count, d) + power * std::log(threshold / at));
  return d * std::erfc(z / std::sqrt(2.0));
}

class GaussianKCalibratedSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    next_ = carried_;
    passes_ = 1;
    if (u.size() < kSmallestFit || step.k > u.size() / 2) {
      exact_->select(u, input, step, selected);
      candidates_ = exact_->diagnostics().candidates;
      return;
    }
    const double d = static_cast<double>(u.size()), k = static_cast<double>(step.k);
    const bool fresh = carried_.threshold < 0;
    // A new density: what is sent now is what exceeded the old threshold, or lies not far below it.
    const bool moved = k < 0.7 * carried_.count || k > 1.4 * carried_.count;
    const double more =
        moved ? 2 : std::clamp((1 - kBand) * std::exp(3 * std::sqrt(carried_.variance)), 1.0, 3.0);
    const double predicted = moved ? more * k : more * k * std::exp(-carried_.bias);
    double bound = carried_.threshold;
    if (bound > 0) bound = fitted(bound, carried_.count, predicted, d, carried_.power);
    if (moved) bound = std::min(bound, carried_.threshold);
    MagnitudeKey above = fresh ? kLargestFinite : key_below(bound);
    // No list of one thread is cut off while the whole is within this limit: so threads make no difference.
    const double largest_list = 8 * std::max(k, moved ? carried_.count : 0) + 4096;
    const auto limit = static_cast<std::size_t>(largest_list);
    accumulate_and_collect(u, input, above, limit, found_);
    candidates_ = found_.count();
    if (!begin_selection(found_.finite(), selected)) return;
    if (fresh) return take_exactly(u, step.k, selected);

    const auto too_long = [&] { return !found_.complete() || found_.count() > limit; };
    const bool updates_bound = !moved && bound > 0;
    if (too_long()) {
      take_exactly(u, step.k, selected);
      if (updates_bound && next_.threshold > 0)
        learn_count(modelled(bound, next_.threshold, k, d, carried_.power), predicted);
      return;
    }
    if (updates_bound) learn_count(static_cast<double>(candidates_), predicted);
    for (int again = 1; !too_long() && static_cast<double>(found_.count()) < fewest(k) && above > 0;
         ++again) {
      if (again > kMorePasses) return take_exactly(u, step.k, selected);
      // The second time as if the tail were flatter.
      bound =
          fitted(bound, std::max(0.5, static_cast<double>(found_.count())), 2 * k, d, carried_.power / again);
      above = key_below(bound);
      collect(u, above, limit, found_);
      ++passes_;
    }
    if (too_long()) return take_exactly(u, step.k, selected);
    take_list({above > 0 ? bound : 0, static_cast<double>(found_.count())}, u, step.k, selected);
  }

  void commit(const SelectOutcome& outcome) override {
    carried_ = next_;
    exact_->commit(outcome);
  }

  void discard() override {
    next_ = carried_;
    exact_->discard();
  }

  void save(StateWriter& writer) const override { writer.put(carried_); }

  void load(StateReader& reader) override {
    const auto read = reader.get<Carried>();
    const bool threshold_fits =
        read.threshold == -1 || (read.threshold >= 0 && std::isfinite(read.threshold));
    if (!threshold_fits || !(read.count >= (read.threshold < 0 ? 0 : 1)) || !(read.count < 0x1p32) ||
        !(read.power >= kLeastPower && read.power <= kLargestPower) ||
        !(std::abs(read.bias) <= kLargestBias) || !(read.variance >= 0 && read.variance <= kLargestVariance))
      StateReader::fail("has no valid threshold of gaussiank_calibrated");
    carried_ = next_ = read;
  }

  SelectDiagnostics diagnostics() const override { return {.candidates = candidates_, .passes = passes_}; }

 private:
  struct Carried {          // as saved
    double threshold = -1;  // -1: nothing is known; 0: every entry but zeros exceeds it
    double count = 0;       // how many exceeded it
    double power = 1;
    double bias = 0;         // mean of log(entries listed / entries predicted)
    double variance = 0.04;  // of what falls short of that mean
  };
  static_assert(sizeof(Carried) == 40, "no padding is saved");
  struct Point {
    double threshold, count;
  };
  void take_list(Point listed, std::span<const float> u, std::size_t k, Selection& selected) {
    if (listed.count <= most(static_cast<double>(k))) {
      take_found(found_, selected);
      next_.threshold = selected.threshold = listed.threshold;
      next_.count = std::max(1.0, listed.count);
      return;
    }
    if (listed.threshold > 0 && cut_list(listed, static_cast<double>(u.size()), k, selected)) return;
    const MagnitudeKey kth = select_from(found_, key_below(listed.threshold), k, selected);
    selected.threshold = magnitude_of(kth);
    next_.threshold = magnitude_of(static_cast<MagnitudeKey>(kth - 1));
    next_.count = static_cast<double>(k);
    learn_power(listed, {next_.threshold, next_.count}, static_cast<double>(u.size()));
  }

  // False if three evaluations did not find a threshold that will do.
  bool cut_list(Point listed, double d, std::size_t k, Selection& selected) {
    const double target = static_cast<double>(k);
    Point low = listed, high{0, 0};  // counts above and below the band; high.threshold 0: none yet
    for (int evaluation = 1; evaluation <= kEvaluations; ++evaluation) {
      double power = carried_.power;
      if (high.threshold > 0)  // the power that joins the two
        power = (log_quantile(std::max(0.5, high.count), d) - log_quantile(low.count, d)) /
                std::log(high.threshold / low.threshold);
      else
        power /= evaluation;
      const double x = fitted(low.threshold, low.count, target, d, power);
      if (!(x > low.threshold) || !std::isfinite(x)) return false;
      const MagnitudeKey above = key_below(x);
      const std::size_t count = count_listed(found_, above);
      const Point point{x, static_cast<double>(count)};
      if (point.count >= fewest(target) && point.count <= most(target)) {
        take_listed(found_, above, count, selected);
        next_.threshold = selected.threshold = x;
        next_.count = point.count;
        learn_power(listed, point, d);
        return true;
      }
      (point.count > target ? low : high) = point;
    }
    return false;
  }

  void take_exactly(std::span<const float> u, std::size_t k, Selection& selected) {
    ++passes_;
    const MagnitudeKey kth = select_exact(u, k, found_, selected);
    selected.threshold = magnitude_of(kth);
    next_.threshold = 0;
    next_.count = static_cast<double>(k);
    if (kth > 0) {
      next_.threshold = magnitude_of(static_cast<MagnitudeKey>(kth - 1));
      return;
    }
    std::size_t n = 0;
    for (std::size_t i = 0; i < selected.indices.size(); ++i) {
      selected.indices[n] = selected.indices[i];
      selected.values[n] = selected.values[i];
      n += selected.values[i] != 0;
    }
    selected.indices.resize(n);
    selected.values.resize(n);
  }

  void learn_count(double listed, double predicted) {
    const double error = std::clamp(std::log(std::max(0.5, listed) / predicted), -kLargestBias, kLargestBias);
    const double surprise = error - carried_.bias, shortfall = std::min(0.0, surprise);
    next_.bias = carried_.bias + kLearnBias * surprise;
    next_.variance =
        std::min((1 - kForget) * carried_.variance + kForget * 2 * shortfall * shortfall, kLargestVariance);
  }

  // From two counts that are far enough apart; at most a factor of two at a time.
  void learn_power(Point low, Point high, double d) {
    if (low.count < 1.15 * high.count || !(low.threshold > 0) || !(high.threshold > low.threshold)) return;
    const double seen =
        (log_quantile(high.count, d) - log_quantile(low.count, d)) / std::log(high.threshold / low.threshold);
    if (!(seen > 0) || !std::isfinite(seen)) return;
    const double bounded = std::clamp(seen, carried_.power / 2, carried_.power * 2);
    next_.power = std::clamp(carried_.power * std::pow(bounded / carried_.power, kLearnPower), kLeastPower,
                             kLargestPower);
  }

  Carried carried_, next_;
  std::unique_ptr<Selector> exact_ = make_selector("topk");
  Candidates found_;
  int passes_ = 0;  // reads of u, the pass that adds included and a selection over u counted as one
  std::size_t candidates_ = 0;  // entries that the first pass listed
};

const bool gaussiank_calibrated_registered[] = {
    add_selector<GaussianKCalibratedSelector>(
        "gaussiank_calibrated", "within 8 % of k entries, above a threshold fitted to the last step's tail"),
    add_sparse("gaussiank_calibrated",
               "within 8 % of k entries above a carried, fitted threshold; error feedback keeps the rest",
               {.select = "gaussiank_calibrated"})};

}  // namespace
}  // namespace topknot
