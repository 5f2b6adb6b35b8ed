#pragma once
// RandK: exactly k of the d positions, uniformly without replacement, zeros included. Stich, Cordonnier, Jaggi,
// "Sparsified SGD with Memory", NeurIPS 2018; as in Shi et al., arXiv 1911.08772, each rank draws positions of
// its own, or (compress.shared_seed) all ranks draw the same. Values are sent as they are, without the factor
// d / k of the unbiased form: the contraction E|u - RandK(u)|^2 = (1 - k/d) |u|^2 is what error feedback needs.
//
// Floyd's sampling (Bentley and Floyd, "A sample of brilliance", CACM 1987): one number and one lookup in a
// bitmap for each selected entry. Number j of [d - k, d) is word `position + j` of the stream
// CounterRng(seed, compress, step, rank; rank 0 for all with shared_seed). Nothing is carried.

#include <cstdint>
#include <vector>

#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"

namespace topknot {

class RandKSelector final : public Selector {
 public:
  // compress.seed and .shared_seed.
  explicit RandKSelector(const CompressOptions& options);

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selected& selected) override;

 private:
  void draw(std::size_t d, const SelectStep& step, std::vector<std::uint32_t>& indices);

  std::uint64_t seed_;
  bool shared_;
  Candidates broken_;                  // NaN and Inf
  std::vector<std::uint64_t> chosen_;  // a bit per position; all zero between selections
};

}  // namespace topknot
