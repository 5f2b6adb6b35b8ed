#include "compress/select/gaussiank.h"

#include <algorithm>
#include <array>
#include <optional>

#include "compress/select/gaussiank_rule.h"
#include "compress/select/passes/take.h"
#include "compress/sparse_compressor.h"
#include "nn/core/base/check.h"

namespace topknot {
namespace {

using gaussiank::kLevels, gaussiank::Way;
static_assert(gaussiank::kEvaluations == static_cast<int>(kCounts),
              "a pass counts what one step may evaluate");

// What may be asked for from a level on.
std::array<int, kCounts> from(int level) {
  if (level >= static_cast<int>(kCounts)) return {level, level, level};
  return {level, gaussiank::next_level(level, true), gaussiank::next_level(level, false)};
}

}  // namespace

template <class T>
void GaussianKSelector<T>::select(std::span<T> u, std::span<const T> addend, const SelectStep& step,
                                  Selected<T>& selected) {
  trace_.clear();
  next_ = carried_;
  if (gaussiank::too_small(step.k, u.size())) return exact_.select(u, addend, step, selected);

  const Moments fit = accumulate_with_moments(u, addend);
  begin_selection(fit.finite, selected);
  const Way way = gaussiank::way_of(fit.finite, fit.zero, step.k, u.size(), fit);
  if (way == Way::nothing) return;
  if (way == Way::exact) return exact_.select(u, {}, step, selected);

  if (step.density != z_density_) {
    z_ = -normal_quantile(step.density / 2);
    z_density_ = step.density;
  }
  const gaussiank::Thresholds t = gaussiank::thresholds_from(fit.mean + z_ * fit.deviation);
  std::array<Key<T>, kLevels> above;
  std::transform(t.level, t.level + kLevels, above.begin(), key_below<T>);
  std::array<std::optional<std::size_t>, kLevels> counts;
  const auto count = [&](const std::array<int, kCounts>& which, int list) {
    std::array<Key<T>, kCounts> keys;
    for (std::size_t i = 0; i < kCounts; ++i) keys[i] = above[static_cast<std::size_t>(which[i])];
    const auto found = count_and_collect(std::span<const T>(u), keys, above[static_cast<std::size_t>(list)],
                                         16 * step.k + 4096, found_);
    for (std::size_t i = 0; i < kCounts; ++i) counts[static_cast<std::size_t>(which[i])] = found[i];
  };
  int listed = carried_.last;
  count(carried_.path, listed);

  const int last = gaussiank::last_level(step.k, [&](int evaluation, int level) {
    const auto at = static_cast<std::size_t>(level);
    if (!counts[at]) {
      listed = level;
      count(from(level), listed);
    }
    std::copy_n(from(level).begin(), gaussiank::kEvaluations - evaluation, next_.path.begin() + evaluation);
    trace_.push_back({t.level[at], *counts[at]});
    return *counts[at];
  });
  const auto at = static_cast<std::size_t>(last);
  next_.last = last;
  if (last != listed || !found_.complete()) collect(std::span<const T>(u), above[at], *counts[at], found_);
  take_found(found_, selected);
  selected.threshold = t.level[at];
}

template <class T>
void GaussianKSelector<T>::commit(const SelectOutcome<T>& outcome) {
  carried_ = next_;
  exact_.commit(outcome);
}

template <class T>
void GaussianKSelector<T>::discard() {
  next_ = carried_;
  exact_.discard();
}

template class GaussianKSelector<float>;
template class GaussianKSelector<double>;

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
