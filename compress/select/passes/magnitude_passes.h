#pragma once
// Passes over magnitudes |x|, for selectors that fit or search a threshold. Sums are in double, by chunk over
// 16 lanes and chunks in order, so that the number of threads does not change a bit of them.

#include <cstddef>
#include <cstdint>
#include <span>

#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"

namespace topknot {

// Moments of all |x|, or of those above a threshold.
struct MagnitudeMoments {
  std::size_t count = 0;
  double mean = 0;
  double variance = 0;  // sum (|x| - mean)^2 / (count - 1); NaN for fewer than two
  double norm = 0;      // sqrt(sum x^2)
  double smallest = 0, largest = 0;
  bool finite = true;  // no NaN or Inf anywhere; the rest means nothing if this is false

  bool constant() const { return smallest == largest; }
};

// Adds to u, and the moments of |u| in the same pass. u is not empty.
MagnitudeMoments accumulate_with_magnitudes(std::span<float> u, const FeedbackInput& input);

// The moments of those |x| that exceed t >= 0, relative to t; all zero where none does. All x are finite.
MagnitudeMoments magnitudes_above(std::span<const float> u, double t);

// How many keys exceed `above`.
std::size_t count_above(std::span<const float> u, MagnitudeKey above);

// The mean of ln(|x| / norm + epsilon), epsilon the distance from 1 to the next double; norm at least every
// |x|.
double mean_log_magnitude(std::span<const float> u, double norm);

// The key such that key_of(x) > key exactly where |x| >= t; -1 if t <= 0. t is no NaN.
inline MagnitudeKey key_reaching(double t) {
  const MagnitudeKey below = key_below(t);
  return below >= 0 && static_cast<double>(magnitude_of(below)) == t ? below - 1 : below;
}

// Counts and takes the entries above thresholds of one vector. It keeps the entries above the lowest
// threshold that gave a short list; what is asked above that needs no pass.
class ThresholdSearch {
 public:
  // u stays valid and unchanged until the last take(). `limit`: the longest list worth keeping, a part.
  void start(std::span<const float> u, std::size_t limit) {
    u_ = u;
    limit_ = limit;
    have_list_ = false;
  }
  std::size_t count(MagnitudeKey above);
  // Replaces the contents of `selected` by the entries above; exactly `count` of them.
  void take(MagnitudeKey above, std::size_t count, Selection& selected);
  // Calls body(index, value) for at least the entries above, ascending: from the list if it has them all,
  // else for the whole vector, on one thread.
  void for_each(MagnitudeKey above, auto&& body) const {
    if (listed(above)) {
      for (const auto& part : found_.parts)
        for (std::size_t i = 0; i < part.count; ++i) body(part.index[i], part.value[i]);
    } else {
      for (std::size_t i = 0; i < u_.size(); ++i) body(static_cast<std::uint32_t>(i), u_[i]);
    }
  }

 private:
  bool listed(MagnitudeKey above) const { return have_list_ && above >= bound_; }

  std::span<const float> u_;
  std::size_t limit_ = 0;
  Candidates found_;
  MagnitudeKey bound_ = 0;  // found_ holds all entries above it, where have_list_
  bool have_list_ = false;
};

}  // namespace topknot
