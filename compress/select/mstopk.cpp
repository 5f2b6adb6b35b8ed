// MSTopK (Shi et al., "Towards scalable distributed training of deep learning on public cloud clusters",
// MLSys 2021, arXiv 2010.10458): exactly k entries, nearly the largest. 30 bisections of q in t = mean + q
// (max - mean) of |u| leave the threshold t1 that most but at most k reach (|u| >= t1) and the threshold t2
// that fewest but more than k reach. The entries that reach t1 are sent, and of those between, t2 <= |u| <
// t1, a run of neighbours that makes up k, which starts at a random one. Zeros count as entries.
//
// If t1 was not found none is above it, and if t2 was not found it is 0: for densities beyond the share of
// magnitudes above their mean, the run is taken from everything below t1, however small. The run starts at
// entry number `word below (entries between - run's length + 1)`, with word `position` of the stream
// CounterRng(seed, compress, step, rank). Without a finite mean: exactly (topk). Nothing is carried.

#include <cstdint>
#include <limits>

#include "compress/select/passes/keys.h"
#include "compress/select/passes/magnitude_passes.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"

namespace topknot {
namespace {

constexpr int kBisections = 30;

// Adds, in order, the entries of a sequence that reach t1, and of those that reach only t2 the run.
class Picker {
 public:
  Picker(MagnitudeKey above1, MagnitudeKey above2, std::size_t start, std::size_t length, Selection& selected)
      : above1_(above1), above2_(above2), start_(start), length_(length), selected_(selected) {}
  void operator()(std::uint32_t index, float value) {
    const MagnitudeKey key = key_of(value);
    if (key <= above2_) return;
    // Between: positions before `start` wrap round to huge ones.
    if (key <= above1_ && between_++ - start_ >= length_) return;
    selected_.indices.push_back(index);
    selected_.values.push_back(value);
  }

 private:
  MagnitudeKey above1_, above2_;
  std::size_t start_, length_, between_ = 0;
  Selection& selected_;
};

class MsTopKSelector final : public Selector {
 public:
  explicit MsTopKSelector(const CompressOptions& options) : seed_(options.seed) {}  // compress.seed

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    const MagnitudeMoments all = accumulate_with_magnitudes(u, input);
    if (!begin_selection(all.finite, selected)) return;
    if (step.k == u.size()) {
      selected.threshold = magnitude_of(select_exact(u, step.k, found_, selected));
      return;
    }
    bracket_ = {{std::numeric_limits<double>::infinity(), 0}, {0, u.size()}};
    search_.start(u, list_limit(step.k));
    bisect(all, step.k);

    const std::size_t length = step.k - bracket_.upper.count,
                      between = bracket_.lower.count - bracket_.upper.count;
    const CounterRng rng(seed_, RngUse::compress, static_cast<std::uint32_t>(step.step),
                         static_cast<std::uint32_t>(step.rank));
    const std::size_t start =
        length == 0 ? 0 : rng.below(step.position, static_cast<std::uint32_t>(between - length + 1));
    const double lowest = length == 0 ? bracket_.upper.threshold : bracket_.lower.threshold;
    const MagnitudeKey above1 =
        bracket_.upper.count == 0 ? kLargestFinite : key_reaching(bracket_.upper.threshold);
    const MagnitudeKey above2 = key_reaching(lowest);
    selected.indices.reserve(step.k);
    selected.values.reserve(step.k);
    search_.for_each(above2, Picker(above1, above2, start, length, selected));
    TOPKNOT_CHECK(selected.indices.size() == step.k, "MSTopK found another number of entries than k");
    selected.threshold = lowest;
  }

  SelectDiagnostics diagnostics() const override { return {.trace = {bracket_.upper, bracket_.lower}}; }

 private:
  // The bisections' result: thresholds t1 and t2 (infinity and 0 if not found) and how many reach them.
  struct Bracket {
    SelectDiagnostics::Evaluation upper, lower;
  };

  void bisect(const MagnitudeMoments& all, std::size_t k) {
    double low = 0, high = 1;
    for (int i = 0; i < kBisections; ++i) {
      const double q = low + (high - low) / 2, t = all.mean + q * (all.largest - all.mean);
      const std::size_t count = search_.count(key_reaching(t));
      (count <= k ? high : low) = q;
      if (count <= k && count > bracket_.upper.count) {
        bracket_.upper = {t, count};
        if (count == k) return;  // no later t can be better
      }
      if (count > k && count < bracket_.lower.count) {
        bracket_.lower = {t, count};
      }
    }
  }

  std::uint64_t seed_;
  Candidates found_;
  ThresholdSearch search_;
  Bracket bracket_;
};

const bool mstopk_registered[] = {
    add_selector<MsTopKSelector>(
        "mstopk", "exactly k entries, nearly the largest, by bisection of a threshold", {.at_most_k = true}),
    add_sparse("mstopk", "exactly k entries, nearly the largest, by bisection; error feedback keeps the rest",
               {.select = "mstopk"})};

}  // namespace
}  // namespace topknot
