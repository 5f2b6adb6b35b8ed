#pragma once
// A fixed threshold: |u| > compress.threshold is sent. Strom, "Scalable distributed DNN training using
// commodity GPU cloud computing", Interspeech 2015, without its quantisation of what is sent; Dutta et al., "On
// the discrepancy between the theoretical analysis and practical implementations of compressed communication
// for distributed deep learning", AAAI 2020 ("hard threshold"). compress.density asks for nothing here, but for
// 1, at which everything is sent. How many are selected is not bounded (compress.capacity does).
//
// One pass, and a second one where far more than last time exceed the threshold. Nothing that a result depends
// on is carried.

#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"

namespace topknot {

// compress.threshold. Throws UserError unless it is finite and above 0.
double fixed_threshold(const CompressOptions& options);

class ThresholdSelector final : public Selector {
 public:
  explicit ThresholdSelector(const CompressOptions& options) : threshold_(fixed_threshold(options)) {}

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;

 private:
  double threshold_;
  Candidates found_;
  std::size_t last_count_ = 0;  // how much room the list gets
};

}  // namespace topknot
