#pragma once
// MSTopK (Shi et al., "Towards scalable distributed training of deep learning on public cloud clusters", MLSys
// 2021, arXiv 2010.10458): exactly k entries, nearly the largest. 30 bisections of q in t = mean + q (max -
// mean) of |u| leave the threshold t1 that most but at most k reach (|u| >= t1) and the threshold t2 that
// fewest but more than k reach. The entries that reach t1 are sent, and of those between, t2 <= |u| < t1, a run
// of neighbours that makes up k, which starts at a random one. Zeros count as entries.
//
// Where t1 was not found none is above it, and where t2 was not found it is 0: for densities beyond the share
// of magnitudes above their mean, the run is taken from everything below t1, however small. The run starts at
// entry number `word below (entries between - run's length + 1)`, with word `position` of the stream
// CounterRng(seed, compress, step, rank). Magnitudes without a finite mean are selected exactly (topk). Nothing
// is carried.

#include <cstdint>

#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/selector.h"

namespace topknot {

class MsTopKSelector final : public Selector {
 public:
  explicit MsTopKSelector(const CompressOptions& options) : seed_(options.seed) {}  // compress.seed

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;

  // What the last bisection ended with: the thresholds (infinity and 0 where not found) and how many reach
  // them.
  struct Bracket {
    double t1 = 0, t2 = 0;
    std::size_t count1 = 0, count2 = 0;
  };
  const Bracket& bracket() const { return bracket_; }

 private:
  void bisect(const MagnitudeMoments& all, std::size_t k);

  std::uint64_t seed_;
  Candidates found_;
  ThresholdSearch search_;
  Bracket bracket_;
};

}  // namespace topknot
