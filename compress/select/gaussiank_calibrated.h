#pragma once
// Selection by a fitted threshold, as in GaussianK-SGD (Shi et al., arXiv 1911.08772), but calibrated on what
// the last step saw, so that one pass is enough and the count stays within 8 % of k. A method of this project.
//
// What differs from gaussiank, and why. GaussianK takes mean and deviation of the whole of u and reads the
// threshold off the normal distribution: t = mean + z(k/d) * deviation, with z(p) the two-sided quantile.
// Under error feedback that fails: everything above the last threshold has left, so u piles up just below it,
// its tail falls far faster than that of a normal distribution with u's deviation, and the rule is off by a
// factor of ten or more (three tries of halving and of half as much again cannot mend that). Here the normal
// tail is fitted where it is needed. With N(x) = #{|u| > x}, the model is
//     N(x) = d * P(|Z| > (x / scale)^power),  Z standard normal,
// so that of two thresholds  x2 = x1 * (z(N2/d) / z(N1/d))^(1/power).  The scale is known from one count above
// one threshold, the power (1 in GaussianK; 1 to 10 under error feedback) is learnt from pairs of counts.
// Neither needs the moments, and both carry from step to step:
//  1. The threshold of the last committed step and its count give a bound for this step, meant to be exceeded
//     by m * k entries. One pass adds the residual and lists what exceeds the bound. How much longer lists
//     have been than predicted (u grows in the first steps) is allowed for; m is 1 where they came as
//     predicted, and more by three standard deviations of what they fell short.
//  2. A list within 8 % of k is sent whole. A longer one is cut at the fitted threshold of k; the cut is
//     counted, and the fit repeated between the counts known by then, three evaluations at most; then, as for
//     ties, the k largest of the list are sent. Only the list is read, never u.
//  3. A list that is too short asks for a second pass with a bound for 2k entries, and for a third one. What
//     is left, the first step, and lists above 8k + 4096 entries (of a density that falls: of the old k) are
//     selected exactly over u, ties to the lower index.
//
// Zeros are never sent, unless k is all of u: of less than k other entries, those are sent. Equal magnitudes that
// cannot be told apart by a threshold: exactly k, the lower indices first. Fewer than 2048 elements, and
// densities above 1/2, are selected exactly, zeros included, as topk does.
// The count and the selection do not depend on the number of threads; they do depend on what is carried,
// which is saved and changes at commit only.

#include "compress/select/topk.h"

namespace topknot {

class GaussianKCalibratedSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;
  void commit(const SelectOutcome& outcome) override;
  void discard() override;
  void save(StateWriter& writer) const override;
  void load(StateReader& reader) override;

  struct Carried {
    double threshold = -1;  // -1: nothing is known; 0: every entry but zeros exceeds it
    double count = 0;       // how many exceeded it
    double power = 1;
    double bias = 0;         // mean of log(entries listed / entries predicted)
    double variance = 0.04;  // of what falls short of that mean
    bool operator==(const Carried&) const = default;
  };
  const Carried& carried() const { return carried_; }

  // Of the last select(): reads of u, the pass that adds included and a selection over u counted as one.
  int passes() const { return passes_; }
  std::size_t candidates() const { return candidates_; }  // entries that the first pass listed

 private:
  struct Point {
    double threshold, count;
  };
  void take_list(Point listed, std::span<const float> u, std::size_t k, Selected& selected);
  bool cut_list(Point listed, double d, std::size_t k, Selected& selected);
  void take_exactly(std::span<const float> u, std::size_t k, Selected& selected);
  void learn_count(double listed, double predicted);
  void learn_power(Point low, Point high, double d);

  Carried carried_, next_;
  TopKSelector exact_;
  Candidates found_;
  int passes_ = 0;
  std::size_t candidates_ = 0;
};

}  // namespace topknot
