// RandK: exactly k of the d positions, uniformly without replacement, zeros included. Stich, Cordonnier,
// Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; as in Shi et al., arXiv 1911.08772, each rank draws
// positions of its own, or (compress.shared_seed) all ranks draw the same. Values are sent as they are,
// without the factor d / k of the unbiased form: the contraction E|u - RandK(u)|^2 = (1 - k/d) |u|^2 is what
// error feedback needs.
//
// Floyd's sampling (Bentley and Floyd, "A sample of brilliance", CACM 1987): one number and one lookup in a
// bitmap for each selected entry. Number j of [d - k, d) is word `position + j` of the stream
// CounterRng(seed, compress, step, rank; rank 0 for all with shared_seed). Nothing is carried.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <vector>

#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "nn/core/rng.h"

namespace topknot {
namespace {

const Option kSharedSeed{.name = "shared_seed", .standard = false, .help = "the same positions on all ranks"};

class RandKSelector final : public Selector {
 public:
  // compress.seed and .shared_seed.
  explicit RandKSelector(const CompressOptions& options)
      : seed_(options.seed), shared_(options.get<bool>(kSharedSeed)) {}

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    accumulate_and_collect(u, input, kLargestFinite, 0, broken_);
    if (!begin_selection(broken_.finite(), selected)) return;
    draw(u.size(), step, selected.indices);
    selected.values.resize(step.k);
    for (std::size_t i = 0; i < step.k; ++i) selected.values[i] = u[selected.indices[i]];
  }

 private:
  void draw(std::size_t d, const SelectStep& step, std::vector<std::uint32_t>& indices) {
    indices.resize(step.k);
    if (step.k == d) return std::iota(indices.begin(), indices.end(), 0u);
    chosen_.resize((d + 63) / 64);
    const CounterRng rng(seed_, RngUse::compress, static_cast<std::uint32_t>(step.step),
                         shared_ ? 0u : static_cast<std::uint32_t>(step.rank));
    std::size_t n = 0;
    for (std::size_t j = d - step.k; j < d; ++j) {
      std::uint32_t i = rng.below(step.position + j, static_cast<std::uint32_t>(j + 1));
      if (chosen_[i / 64] >> (i % 64) & 1) i = static_cast<std::uint32_t>(j);
      chosen_[i / 64] |= std::uint64_t{1} << (i % 64);
      indices[n++] = i;
    }
    // Few are sorted; of many the bitmap is read.
    if (step.k < d / 1024) {
      std::sort(indices.begin(), indices.end());
      for (const std::uint32_t i : indices) chosen_[i / 64] = 0;
      return;
    }
    n = 0;
    for (std::size_t w = 0; w < chosen_.size(); ++w)
      for (std::uint64_t& bits = chosen_[w]; bits != 0; bits &= bits - 1)
        indices[n++] = static_cast<std::uint32_t>(64 * w + static_cast<std::size_t>(std::countr_zero(bits)));
  }

  std::uint64_t seed_;
  bool shared_;
  Candidates broken_;                  // NaN and Inf
  std::vector<std::uint64_t> chosen_;  // a bit per position; all zero between selections
};

const bool randk_registered[] = {
    add_selector<RandKSelector>("randk", "exactly k entries at random positions (compress.shared_seed)",
                                {.at_most_k = true}, {kSharedSeed}),
    add_sparse("randk", "k entries at random positions; error feedback keeps the rest", {.select = "randk"})};

}  // namespace
}  // namespace topknot
