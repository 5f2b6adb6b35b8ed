#pragma once
// Records rank 0's gradients for studies, in addition to the metrics: the raw gradients of some steps
// (train.record_gradients) and the distribution of the accumulated ones (train.distribution_every). It
// changes no value; recorded steps take longer.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dist/exchange/exchange.h"
#include "nn/core/parameter.h"
#include "train/config/config.h"
#include "train/metrics/metrics.h"
#include "train/run_directory.h"

namespace topknot {

inline constexpr int kHistogramBins = 101;  // over [-kHistogramReach, kHistogramReach) deviations
inline constexpr int kLeastExponent = -40, kGreatestExponent = 8;  // of the magnitudes' bins

// The shape of an accumulated gradient and how much of it the k largest entries hold: Shi, Chu, Cheung, See,
// "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv 1911.08772, section 3. Sets
// everything of the record but step and epoch. `u`: one value or more, all finite, else Error; density in
// (0, 1]. The deviation is a sample's (n - 1). Where it is 0 all elements count in the middle bin.
DistributionRecord distribution_of(std::span<const float> u, double density);

class GradientsWriter;

class Recorder {
 public:
  // Ranks other than 0 record nothing. Arena and exchange must outlive the recorder, which is the exchange's
  // observer from here on; `exchange` may be null if no distribution is recorded (gradients on a GPU).
  // gradients.safetensors in the run directory: one row per recorded step, in arena order (ParameterArena),
  // which docs/run.md states and whose offsets --dry-run prints. Throws UserError if it cannot be written. A
  // file that an earlier start left stays as it is.
  Recorder(const Config& config, const RunDirectory& folder, const ParameterArena& arena, Exchange* exchange,
           bool root);
  ~Recorder();

  // `step`: how many were done before.
  void begin_step(std::int64_t step);
  // This parameter's gradient is final, before clipping and compression. Waits for a GPU.
  void take(const Parameter& parameter) {
    if (record_gradient_)
      backend(device_).to_host(gradient_.data() + parameter.offset(), parameter.gradient(),
                               parameter.numel());
  }
  // Writes the records of the step. A step that was skipped has no distribution.
  void end_step(const StepRecord& record, MetricsWriter& metrics);
  // Closes gradients.safetensors with the steps that there were, if any.
  void finish();

 private:
  void observe(const Group& group, std::span<const float> accumulated) {
    if (!record_distribution_) return;
    std::copy(accumulated.begin(), accumulated.end(), accumulated_.data() + group.begin);
    observed_ += accumulated.size();
  }

  const std::int64_t from_, steps_, every_;
  const bool local_;  // only syncs have accumulated gradients, which are changes of weights
  const std::string method_;
  const Device device_;
  std::int64_t recorded_ = 0;  // steps in gradients.safetensors
  bool record_gradient_ = false, record_distribution_ = false, warned_ = false;
  std::vector<float> gradient_;            // the whole arena
  std::vector<float> accumulated_;         // the arena's compressible part
  std::size_t observed_ = 0;               // elements of it that this step brought
  std::unique_ptr<GradientsWriter> file_;  // null: nothing is recorded any more
};

}  // namespace topknot
