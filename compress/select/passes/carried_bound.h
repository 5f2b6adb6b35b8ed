#pragma once
// The bound by which selectors of exactly k (topk, regtopk) get along with one pass: the k-th key of the last
// committed step, lowered by a margin that follows how much the k-th key falls between steps. What exceeds the
// bound is listed while the residual is added; where the list is too short or too long, radix selection gives
// the answer. So the bound decides how fast the answer comes, never what it is, and need not be saved.

#include <algorithm>

#include "compress/select/passes/keys.h"

namespace topknot {

template <class T>
struct CarriedBound {
  Key<T> kth = -1;       // the k-th key of the last committed step; -1: none
  double margin = 0.02;  // the bound is (1 - margin) times that magnitude

  bool known() const { return kth >= 0; }
  double magnitude() const { return (1.0 - margin) * magnitude_of<T>(kth); }  // the bound; where known()

  // The bound after a step whose k-th key is `now` and whose list was like that. Too many listed mean a margin
  // too wide, too few one too narrow. Else it takes three times the last fall at once and forgets slowly.
  enum class List { good, too_few, too_many };
  CarriedBound after(Key<T> now, List list) const {
    constexpr double smallest = 0.004, largest = 0.1;
    if (kth <= 0) return {now, margin};
    const double fall = 1.0 - static_cast<double>(magnitude_of<T>(now)) / magnitude_of<T>(kth);
    const double wanted = list == List::good ? std::max(0.9 * margin, 3.0 * fall)
                                             : margin * (list == List::too_many ? 0.5 : 2.0);
    return {now, std::clamp(wanted, smallest, largest)};
  }

  bool operator==(const CarriedBound&) const = default;
};

}  // namespace topknot
