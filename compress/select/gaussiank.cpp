#include "compress/select/gaussiank.h"

#include <algorithm>
#include <array>

#include "compress/select/normal_quantile.h"
#include "compress/select/take.h"
#include "nn/core/check.h"

namespace topknot {
namespace {

constexpr std::size_t kSmallestFit = 2048;  // elements below which moments say too little
constexpr int kEvaluations = 3;

// The thresholds that three evaluations can reach are t times 1, 0.5, 1.5, 0.25, 0.75 and 2.25. Halving is
// exact, so 0.75 is the same number from either side.
struct Step {
  int fewer, more;  // the rung after one where too many, or too few, were selected
};
constexpr std::array<Step, 3> kNext = {{{2, 1}, {4, 3}, {5, 4}}};
std::array<double, kRungs> rungs(double t) {
  return {t, t * 0.5, t * 1.5, t * 0.5 * 0.5, t * 0.5 * 1.5, t * 1.5 * 1.5};
}

}  // namespace

template <class T>
void GaussianKSelector<T>::select(std::span<T> u, std::span<const T> addend, const SelectStep& step,
                                  Selected<T>& selected) {
  trace_.clear();
  next_rung_ = rung_;
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
  const std::array<double, kRungs> t = rungs(fit.mean + z_ * deviation);
  std::array<Key<T>, kRungs> above;
  std::transform(t.begin(), t.end(), above.begin(), key_below<T>);
  const std::array<std::size_t, kRungs> counts = count_and_collect(
      std::span<const T>(u), above, above[static_cast<std::size_t>(rung_)], 16 * step.k + 4096, found_);

  std::size_t rung = 0;
  for (int evaluation = 1;; ++evaluation) {
    trace_.push_back({t[rung], counts[rung]});
    const double count = static_cast<double>(counts[rung]), k = static_cast<double>(step.k);
    const bool few = count<(2 * k / 3), many = count>(4 * k / 3);
    if ((!few && !many) || evaluation == kEvaluations) break;
    rung = static_cast<std::size_t>(few ? kNext[rung].more : kNext[rung].fewer);
  }
  if (static_cast<int>(rung) != rung_ || !found_.complete())
    collect(std::span<const T>(u), above[rung], counts[rung], found_);
  next_rung_ = static_cast<int>(rung);
  take_found(found_, selected);
  selected.threshold = t[rung];
}

template <class T>
void GaussianKSelector<T>::commit(const SelectOutcome<T>& outcome) {
  rung_ = next_rung_;
  exact_.commit(outcome);
}

template <class T>
void GaussianKSelector<T>::discard() {
  next_rung_ = rung_;
  exact_.discard();
}

template class GaussianKSelector<float>;
template class GaussianKSelector<double>;

namespace {

const bool registered = [] {
  add_selector<GaussianKSelector>("gaussiank",
                                  "about k entries, above a threshold from a fitted normal distribution");
  return true;
}();

}  // namespace
}  // namespace topknot
