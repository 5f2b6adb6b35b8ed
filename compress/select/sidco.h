#pragma once
// SIDCo (Abdelmoniem, Elzanaty, Alouini, Canini, "An efficient statistical-based gradient compression technique
// for distributed training systems", MLSys 2021; details as in the authors' code, sands-lab/SIDCo): a threshold
// from a distribution fitted to |u|, in one or several stages. The first stage asks for a quarter of the
// entries, or for all of the density r where it is the only one or r is at least a quarter; each of the M - 1
// others fits the tail above the last threshold and asks for (r / 0.25)^(1 / (M - 1)) of it; at r of a quarter or
// more there are none (the code goes on, with a ratio of 1 or more). Strictly above the last threshold is sent;
// how many that are is not bounded. With mean m and variance v of |u|, or of the tail's
// |u| - min with min the smallest magnitude in it (to which the threshold is then added):
//   exponential  t = -m ln r
//   pareto       t = a (1 - e^(c ln r)) / c, a = m (m^2/v + 1) / 2, c = (m^2/v - 1) / 2 (generalised Pareto)
//   gamma        first stage: s = ln m - mean of ln(|u| + 2^-52), of u / |u|_2; shape = (3 - s + sqrt((s - 3)^2
//                + 24 s)) / 12 s; t = m / shape times the gamma quantile of r; the others as pareto
//
// compress.stages: 0 starts with one stage and looks every five committed steps at the mean of count / (r d):
// above 1.2 one stage fewer, below 0.8 one more, between 1 and ceil(log2(1 / r)). (The code's modes that turn
// round when the estimate gets worse, and its search of the first ratio, which is off there, are left out.)
//
// Where that code divides by zero, throws or never sends anything: c = 0 is the exponential's t; a tail that is
// empty or of one magnitude ends the stages, and the last threshold holds; a vector of zeros selects nothing;
// one of one magnitude, one shorter than 1 / r (whose largest entry no fit would reach), and one whose moments
// are beyond double or allow no fit are selected exactly (topk), which the count of stages does not learn from.
// Where k asks for everything, everything is sent.
//
// Carried and saved: the stages, and the steps and sum of the mean that is being taken.

#include <cstdint>
#include <string>
#include <vector>

#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/selector.h"

namespace topknot {

class SidcoSelector final : public Selector {
 public:
  // compress.distribution and .stages. Throws UserError for values that are none.
  explicit SidcoSelector(const CompressOptions& options);

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;
  void commit(const SelectOutcome&) override { carried_ = next_; }
  void discard() override { next_ = carried_; }
  void save(StateWriter& writer) const override;
  void load(StateReader& reader) override;

  // The stages of the last select(): thresholds, and how many entries exceed them; the last one's are sent.
  // Empty where the selection was exact.
  struct Stage {
    double threshold = 0;
    std::size_t count = 0;
  };
  const std::vector<Stage>& trace() const { return trace_; }
  // What is carried from step to step.
  struct Carried {
    std::int32_t stages = 1;
    std::int32_t steps = 0;  // committed since the stages were looked at
    double sum = 0;          // of count / (r d) over those
    bool operator==(const Carried&) const = default;
  };
  const Carried& carried() const { return carried_; }

 private:
  enum class Distribution { exponential, pareto, gamma };

  double first_threshold(std::span<const float> u, const MagnitudeMoments& all, double ratio) const;
  double tail_threshold(const MagnitudeMoments& tail, double ratio) const;
  void take(MagnitudeKey above, Selected& selected);
  void learn(double share, double ratio);

  Distribution distribution_ = Distribution::exponential;
  std::int32_t fixed_stages_ = 0;  // 0: adaptive
  Carried carried_, next_;
  std::vector<Stage> trace_;
  Candidates found_;
  ThresholdSearch search_;
  Selected tail_;  // the entries above a stage's threshold, once they are few
  bool listed_ = false;
};

}  // namespace topknot
