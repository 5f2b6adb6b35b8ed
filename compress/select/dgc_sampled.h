#pragma once
// The hierarchical sampled selection of Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv
// 1712.01887, section 5, as the authors' code has it, dgc/compression.py of synxlin/deep-gradient-compression).
// k = ceil(density * d). A threshold t is the least of the largest magnitudes of a strided sample; |u| >= t is
// selected. Then, at most ten times: more than 1.3 k, and the k largest of those selected are sent, exactly
// (compress.resample; without it t rises by 1.3); fewer than 0.8 k, and t falls by 0.8. Between k and 1.3 k the
// first k by position are sent (compress.truncate: lowest), which is unjust to late positions, or the k largest
// (largest). At most k entries are sent, possibly fewer.
//
// Where we differ from that code: at density 1 everything is sent; where t cannot rise because it is 0, which
// means more zeros than there is room for, the exact k largest are sent. A vector of zeros sends k zeros, as
// there. A vector that the sample covers whole (d at most 2 / density) is compared with its own k-th magnitude.
//
// The sample starts at word `position` of the stream CounterRng(seed, compress, step, rank), below the stride.
// Nothing is carried from step to step.

#include <cstdint>
#include <string>

#include "compress/select/dgc_rule.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"

namespace topknot {

// numel >= 1; density and sample_ratio in (0, 1]. The sample has at least max(ceil(numel * sample_ratio),
// ceil(2 / density)) elements.
SampleGeometry sample_geometry(std::size_t numel, double density, double sample_ratio);

// compress.sample_ratio, .resample and .truncate.
struct DgcSampledOptions {
  double sample_ratio;
  bool resample, lowest;
};
// Throws UserError for values outside their ranges.
DgcSampledOptions dgc_sampled_options(const CompressOptions& options);

class DgcSampledSelector final : public Selector {
 public:
  explicit DgcSampledSelector(const CompressOptions& options)
      : options_(dgc_sampled_options(options)), seed_(options.seed) {}

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;

  // Of the last select(): how often t was changed, and whether the selection was exact in the end.
  int adaptations() const { return adaptations_; }
  bool exact() const { return exact_; }

 private:
  MagnitudeKey sampled_key(std::span<const float> u, const FeedbackInput& input,
                           const SampleGeometry& geometry, std::size_t start);
  std::size_t adapt(std::span<const float> u, const SampleGeometry& geometry, std::size_t limit, float& t);
  void take_exact(std::span<const float> u, MagnitudeKey above, std::size_t k, Selected& selected);
  void take_first(std::size_t k, Selected& selected) const;

  DgcSampledOptions options_;
  std::uint64_t seed_;
  Candidates found_;
  std::vector<std::vector<MagnitudeKey>> kept_;  // scratch of the sample, by part
  int adaptations_ = 0;
  bool exact_ = false;
};

}  // namespace topknot
