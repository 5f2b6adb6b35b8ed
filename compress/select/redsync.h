#pragma once
// RedSync's threshold search (Fang, Fu, Yang, Hsieh, "RedSync: reducing synchronization bandwidth for
// distributed deep learning training system", JPDC 2019, as the code of Shi et al., arXiv 1911.08772, has it):
// t = mean + q (max - mean) of |u|, and q halves the interval [0, 1] until it is at most 0.2 wide: down where
// fewer than k/2 exceed t, up otherwise; it stops early where more than k and fewer than 2k do. At most three
// evaluations, and the last one's entries are sent, however many they are: usually fewer than k, sometimes many
// more. Preset redsync adds error feedback.
//
// A vector of one magnitude (max = mean: no t between them), of which that rule would never send anything, is
// selected exactly (topk), and so is a vector whose magnitudes have no finite mean. Where k asks for everything,
// everything is sent. Nothing is carried.
//
// Two passes in the usual case: the first adds the residual and takes mean and max, the second lists the
// entries above t; each lower t takes another one.

#include <vector>

#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/selector.h"

namespace topknot {

class RedSyncSelector final : public Selector {
 public:
  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;

  // The evaluations of the last select(); empty where the selection was exact.
  struct Evaluation {
    double q = 0, threshold = 0;
    std::size_t count = 0;
  };
  const std::vector<Evaluation>& trace() const { return trace_; }

 private:
  Candidates found_;
  ThresholdSearch search_;
  std::vector<Evaluation> trace_;
};

}  // namespace topknot
