#include "compress/select/topk.h"

#include <algorithm>
#include <numeric>

#include "compress/select/exact.h"
#include "nn/core/check.h"

namespace topknot {
namespace {

constexpr double kSmallestMargin = 0.004, kLargestMargin = 0.1;

}  // namespace

template <class T>
void TopKSelector<T>::select(std::span<T> u, std::span<const T> addend, const SelectStep& step,
                             Selected<T>& selected) {
  TOPKNOT_CHECK(step.k >= 1 && step.k <= u.size(), "k outside 1 to the vector's length");
  next_ = carried_;
  selected.finite = true;
  const bool all = step.k == u.size();
  // With nothing carried only NaN and Inf are looked for.
  Key<T> above = largest_finite_key<T>();
  if (carried_.kth >= 0 && !all)
    above = std::min(above, key_below<T>((1.0 - carried_.margin) * magnitude_of<T>(carried_.kth)));
  accumulate_and_collect(u, addend, above, 8 * step.k + 4096, found_);
  candidates_ = found_.count();
  fell_back_ = false;
  if (!found_.finite()) {
    selected.finite = false;
    selected.indices.clear();
    selected.values.clear();
    selected.threshold = 0;
    return;
  }
  if (all) {
    selected.indices.resize(u.size());
    std::iota(selected.indices.begin(), selected.indices.end(), 0u);
    selected.values.assign(u.begin(), u.end());
    Key<T> smallest = largest_finite_key<T>();
    for (const T x : u) smallest = std::min(smallest, key_of(x));
    selected.threshold = magnitude_of<T>(smallest);
    return;
  }
  found_too_many_ = !found_.complete();
  fell_back_ = found_too_many_ || candidates_ < step.k;
  const Key<T> kth = fell_back_ ? select_exact(std::span<const T>(u), step.k, found_, selected)
                                : select_from(found_, above, step.k, selected);
  selected.threshold = magnitude_of<T>(kth);
  learn(kth);
}

// Too many candidates mean a margin too wide, too few one too narrow. Else the margin follows the falls of
// the k-th magnitude: it takes three times the last one at once and forgets slowly.
template <class T>
void TopKSelector<T>::learn(Key<T> kth) {
  next_.kth = kth;
  if (carried_.kth <= 0) return;
  const double fall = 1.0 - static_cast<double>(magnitude_of<T>(kth)) / magnitude_of<T>(carried_.kth);
  double margin = std::max(0.9 * carried_.margin, 3.0 * fall);
  if (fell_back_) margin = carried_.margin * (found_too_many_ ? 0.5 : 2.0);
  next_.margin = std::clamp(margin, kSmallestMargin, kLargestMargin);
}

template <class T>
void TopKSelector<T>::commit(const SelectOutcome<T>&) {
  carried_ = next_;
}

template <class T>
void TopKSelector<T>::discard() {
  next_ = carried_;
}

template class TopKSelector<float>;
template class TopKSelector<double>;

namespace {

const bool registered = [] {
  add_selector<TopKSelector>("topk", "exactly k entries, the largest magnitudes; ties to the lower index");
  return true;
}();

}  // namespace
}  // namespace topknot
