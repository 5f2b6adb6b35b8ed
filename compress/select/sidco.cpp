// SIDCo (Abdelmoniem, Elzanaty, Alouini, Canini, "An efficient statistical-based gradient compression
// technique for distributed training systems", MLSys 2021; details as in the authors' code, sands-lab/SIDCo):
// a threshold from a distribution fitted to |u|, in one or several stages. The first stage asks for a quarter
// of the entries, or for all of the density r if it is the only one or r is at least a quarter; each of the M
// - 1 others fits the tail above the last threshold and asks for (r / 0.25)^(1 / (M - 1)) of it; at r of a
// quarter or more there are none (the code goes on, with a ratio of 1 or more). Strictly above the last
// threshold is sent; how many that are is not bounded. With mean m and variance v of |u|, or of the tail's
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
// If that code divides by zero, throws or never sends anything: c = 0 is the exponential's t; a tail that is
// empty or of one magnitude ends the stages, and the last threshold holds; a vector of zeros selects nothing;
// one of one magnitude, one shorter than 1 / r (whose largest entry no fit would reach), and one whose
// moments are beyond double or allow no fit are selected exactly (topk), which the count of stages does not
// learn from. If k asks for everything, everything is sent.
//
// Carried and saved: the stages, and the steps and sum of the mean that is being taken.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "compress/select/passes/keys.h"
#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/passes/passes.h"
#include "compress/select/passes/quantiles.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

const Option kDistribution{.name = "distribution",
                           .standard = "exponential",
                           .help = "which distribution is fitted",
                           .choices = {"exponential", "pareto", "gamma"}};
const Option kStages{"stages", 0, "fits per step; 0: adaptive", 0, 100};

constexpr double kFirstRatio = 0.25, kTooMany = 1.2, kTooFew = 0.8;
constexpr std::int32_t kSteps = 5;          // between two looks at the stages
constexpr std::int32_t kMostStages = 1100;  // log2 of the least density
constexpr std::size_t kShortTail = 16;      // a tail of less than a 16th of the vector is worth a list

double exponential_threshold(double mean, double ratio) {
  return -mean * std::log(ratio);
}
double pareto_threshold(double mean, double variance, double ratio) {
  const double shape = mean * mean / variance;
  const double a = 0.5 * mean * (shape + 1), c = 0.5 * (shape - 1);
  // A variance too small to say anything, and c = 0, which is the exponential distribution.
  if (c == 0 || !std::isfinite(c)) return exponential_threshold(mean, ratio);
  return -a * std::expm1(c * std::log(ratio)) / c;
}

class SidcoSelector final : public Selector {
 public:
  // compress.distribution and .stages. Throws UserError for values that are none.
  explicit SidcoSelector(const CompressOptions& options) : fixed_stages_(options.get<int>(kStages)) {
    const auto distribution = options.get<std::string>(kDistribution);
    if (distribution == "pareto") distribution_ = Distribution::pareto;
    if (distribution == "gamma") distribution_ = Distribution::gamma;
  }

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    trace_.clear();
    next_ = carried_;
    listed_ = false;
    const MagnitudeMoments all = accumulate_with_magnitudes(u, input);
    if (!begin_selection(all.finite, selected)) return;
    if (step.k < u.size() && all.largest == 0) return;

    const std::int32_t stages = fixed_stages_ > 0 ? fixed_stages_ : carried_.stages;
    const bool single = stages == 1 || step.density >= kFirstRatio;
    const double wanted = step.density * static_cast<double>(u.size());
    double t = -1;
    if (step.k < u.size() && !all.constant() && wanted >= 1 && std::isnormal(all.norm))
      t = first_threshold(u, all, single ? step.density : kFirstRatio);
    if (!(t >= 0) || !std::isfinite(t)) {
      selected.threshold = magnitude_of(select_exact(u, step.k, found_, selected));
      return;
    }

    search_.start(u, list_limit(step.k));
    if (!single) {
      const double ratio = std::pow(step.density / kFirstRatio, 1.0 / (stages - 1));
      for (std::int32_t stage = 1; stage < stages; ++stage) {
        const MagnitudeMoments tail = magnitudes_above(listed_ ? std::span<const float>(tail_.values) : u, t);
        const double next = tail.count == 0 || tail.constant() ? -1 : tail_threshold(tail, ratio);
        if (!(next >= 0) || !std::isfinite(next)) break;
        trace_.push_back({t, tail.count});
        if (!listed_ && tail.count <= u.size() / kShortTail) {
          search_.take(key_below(t), tail.count, tail_);
          listed_ = true;
        }
        t = next;
      }
    }
    take(key_below(t), selected);
    selected.threshold = t;
    trace_.push_back({t, selected.indices.size()});
    if (fixed_stages_ == 0) learn(static_cast<double>(selected.indices.size()) / wanted, step.density);
  }

  void commit(const SelectOutcome&) override { carried_ = next_; }
  void discard() override { next_ = carried_; }
  void save(StateWriter& writer) const override { writer.put(carried_); }

  void load(StateReader& reader) override {
    const auto carried = reader.get<Carried>();
    if (carried.stages < 1 || carried.stages > kMostStages || carried.steps < 0 || carried.steps >= kSteps ||
        !(carried.sum >= 0) || !std::isfinite(carried.sum))
      StateReader::fail("holds stages of sidco that cannot be");
    carried_ = next_ = carried;
  }

  SelectDiagnostics diagnostics() const override { return {.trace = trace_}; }

 private:
  enum class Distribution { exponential, pareto, gamma };
  struct Carried {  // as saved
    std::int32_t stages = 1;
    std::int32_t steps = 0;  // committed since the stages were looked at
    double sum = 0;          // of count / (r d) over those
  };
  static_assert(sizeof(Carried) == 16, "no padding is saved");

  double first_threshold(std::span<const float> u, const MagnitudeMoments& all, double ratio) const {
    if (distribution_ == Distribution::exponential) return exponential_threshold(all.mean, ratio);
    if (distribution_ == Distribution::pareto) return pareto_threshold(all.mean, all.variance, ratio);
    const double s = std::log(all.mean / all.norm) - mean_log_magnitude(u, all.norm);
    const double shape = (3 - s + std::sqrt((s - 3) * (s - 3) + 24 * s)) / (12 * s);
    if (!(s > 0) || !std::isfinite(shape)) return -1;  // magnitudes all but equal: no fit
    return all.mean / shape * gamma_tail_quantile(shape, ratio);
  }

  double tail_threshold(const MagnitudeMoments& tail, double ratio) const {
    const double mean = tail.mean - tail.smallest;
    return tail.smallest + (distribution_ == Distribution::exponential
                                ? exponential_threshold(mean, ratio)
                                : pareto_threshold(mean, tail.variance, ratio));
  }

  void take(MagnitudeKey above, Selection& selected) {
    if (!listed_) return search_.take(above, search_.count(above), selected);
    for (std::size_t i = 0; i < tail_.indices.size(); ++i)
      if (key_of(tail_.values[i]) > above) {
        selected.indices.push_back(tail_.indices[i]);
        selected.values.push_back(tail_.values[i]);
      }
  }

  void learn(double share, double ratio) {
    next_.sum += share;
    if (++next_.steps < kSteps) return;
    const double mean = next_.sum / kSteps;
    const auto most = std::max(1, static_cast<std::int32_t>(std::ceil(std::log(ratio) / std::log(0.5))));
    next_.stages = std::clamp(next_.stages + (mean < kTooFew) - (mean > kTooMany), 1, most);
    next_.steps = 0;
    next_.sum = 0;
  }

  Distribution distribution_ = Distribution::exponential;
  std::int32_t fixed_stages_ = 0;  // 0: adaptive
  Carried carried_, next_;
  std::vector<SelectDiagnostics::Evaluation> trace_;  // by stage; empty if the selection was exact
  Candidates found_;
  ThresholdSearch search_;
  Selection tail_;  // the entries above a stage's threshold, once they are few
  bool listed_ = false;
};

const bool sidco_registered[] = {
    add_selector<SidcoSelector>("sidco",
                                "about k entries, above a threshold from a distribution fitted in stages", {},
                                {kDistribution, kStages}),
    add_sparse("sidco", "about k entries above a threshold fitted in stages; error feedback keeps the rest",
               {.select = "sidco"})};

}  // namespace
}  // namespace topknot
