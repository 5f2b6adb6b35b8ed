#include "compress/select/gaussiank.h"

#include <algorithm>
#include <array>
#include <optional>

#include "compress/select/passes/normal_quantile.h"
#include "compress/select/passes/take.h"
#include "compress/sparse_compressor.h"
#include "nn/core/base/check.h"

namespace topknot {
namespace {

constexpr std::size_t kSmallestFit = 2048;  // elements below which moments say too little
constexpr std::size_t kEvaluations = kCounts;

// The thresholds that three evaluations can reach are t times 1, 0.5, 1.5, 0.25, 0.75 and 2.25. Halving is
// exact, so 0.75 is the same number from either side.
struct Step {
  int fewer, more;  // the level after one where too many, or too few, were selected
};
constexpr std::size_t kReachable = 6;
constexpr std::array<Step, 3> kNext = {{{2, 1}, {4, 3}, {5, 4}}};
// What may be asked for from a level on.
std::array<int, kCounts> from(int level) {
  if (level >= static_cast<int>(kNext.size())) return {level, level, level};
  const Step& next = kNext[static_cast<std::size_t>(level)];
  return {level, next.fewer, next.more};
}
std::array<double, kReachable> levels(double t) {
  return {t, t * 0.5, t * 1.5, t * 0.5 * 0.5, t * 0.5 * 1.5, t * 1.5 * 1.5};
}

}  // namespace

template <class T>
void GaussianKSelector<T>::select(std::span<T> u, std::span<const T> addend, const SelectStep& step,
                                  Selected<T>& selected) {
  trace_.clear();
  next_ = carried_;
  if (u.size() < kSmallestFit || step.k == u.size()) return exact_.select(u, addend, step, selected);

  const Moments fit = accumulate_with_moments(u, addend);
  if (!begin_selection(fit.finite, selected) || fit.zero) return;
  const double deviation = fit.deviation;
  if (!(deviation > 0) || !std::isfinite(deviation) || !std::isfinite(fit.mean))
    return exact_.select(u, {}, step, selected);

  if (step.density != z_density_) {
    z_ = -normal_quantile(step.density / 2);
    z_density_ = step.density;
  }
  const std::array<double, kReachable> t = levels(fit.mean + z_ * deviation);
  std::array<Key<T>, kReachable> above;
  std::transform(t.begin(), t.end(), above.begin(), key_below<T>);
  std::array<std::optional<std::size_t>, kReachable> counts;
  const auto count = [&](const std::array<int, kCounts>& which, int list) {
    std::array<Key<T>, kCounts> keys;
    for (std::size_t i = 0; i < kCounts; ++i) keys[i] = above[static_cast<std::size_t>(which[i])];
    const auto found = count_and_collect(std::span<const T>(u), keys, above[static_cast<std::size_t>(list)],
                                         16 * step.k + 4096, found_);
    for (std::size_t i = 0; i < kCounts; ++i) counts[static_cast<std::size_t>(which[i])] = found[i];
  };
  int listed = carried_.last;
  count(carried_.path, listed);

  std::size_t level = 0;
  for (std::size_t evaluation = 0;; ++evaluation) {
    if (!counts[level]) {
      listed = static_cast<int>(level);
      count(from(listed), listed);
    }
    std::copy_n(from(static_cast<int>(level)).begin(), kEvaluations - evaluation,
                next_.path.begin() + static_cast<std::ptrdiff_t>(evaluation));
    trace_.push_back({t[level], *counts[level]});
    const double number = static_cast<double>(*counts[level]), k = static_cast<double>(step.k);
    const bool few = number<(2 * k / 3), many = number>(4 * k / 3);
    if ((!few && !many) || evaluation + 1 == kEvaluations) break;
    level = static_cast<std::size_t>(few ? kNext[level].more : kNext[level].fewer);
  }
  next_.last = static_cast<int>(level);
  if (next_.last != listed || !found_.complete())
    collect(std::span<const T>(u), above[level], *counts[level], found_);
  take_found(found_, selected);
  selected.threshold = t[level];
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

const bool registered = [] {
  add_selector<GaussianKSelector>("gaussiank",
                                  "about k entries, above a threshold from a fitted normal distribution");
  add_sparse("gaussiank",
             "about k entries above a fitted threshold, without a search; error feedback keeps the rest",
             {.select = "gaussiank"});
  return true;
}();

}  // namespace
}  // namespace topknot
