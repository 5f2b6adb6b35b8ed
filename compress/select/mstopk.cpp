#include "compress/select/mstopk.h"

#include <limits>

#include "compress/select/passes/carried_bound.h"
#include "compress/select/passes/take.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"

namespace topknot {
namespace {

constexpr int kBisections = 30;

// Adds, in order, the entries of a sequence that reach t1, and of those that reach only t2 the run.
class Picker {
 public:
  Picker(MagnitudeKey above1, MagnitudeKey above2, std::size_t start, std::size_t length, Selected& selected)
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
  Selected& selected_;
};

}  // namespace

void MsTopKSelector::select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
                            Selected& selected) {
  TOPKNOT_CHECK(step.k >= 1 && step.k <= u.size(), "k outside 1 to the vector's length");
  const MagnitudeMoments all = accumulate_with_magnitudes(u, input);
  if (!begin_selection(all.finite, selected)) return;
  if (step.k == u.size()) {
    selected.threshold = magnitude_of(select_exact(u, step.k, found_, selected));
    return;
  }
  bracket_ = {std::numeric_limits<double>::infinity(), 0, 0, u.size()};
  search_.start(u, list_limit(step.k));
  bisect(all, step.k);

  const std::size_t length = step.k - bracket_.count1, between = bracket_.count2 - bracket_.count1;
  const CounterRng rng(seed_, RngUse::compress, static_cast<std::uint32_t>(step.step),
                       static_cast<std::uint32_t>(step.rank));
  const std::size_t start =
      length == 0 ? 0 : rng.below(step.position, static_cast<std::uint32_t>(between - length + 1));
  const double lowest = length == 0 ? bracket_.t1 : bracket_.t2;
  const MagnitudeKey above1 = bracket_.count1 == 0 ? kLargestFinite : key_reaching(bracket_.t1);
  const MagnitudeKey above2 = key_reaching(lowest);
  selected.indices.reserve(step.k);
  selected.values.reserve(step.k);
  search_.for_each(above2, Picker(above1, above2, start, length, selected));
  TOPKNOT_CHECK(selected.indices.size() == step.k, "MSTopK found another number of entries than k");
  selected.threshold = lowest;
}

void MsTopKSelector::bisect(const MagnitudeMoments& all, std::size_t k) {
  double low = 0, high = 1;
  for (int i = 0; i < kBisections; ++i) {
    const double q = low + (high - low) / 2, t = all.mean + q * (all.largest - all.mean);
    const std::size_t count = search_.count(key_reaching(t));
    (count <= k ? high : low) = q;
    if (count <= k && count > bracket_.count1) {
      bracket_.t1 = t;
      bracket_.count1 = count;
      if (count == k) return;  // no later t can be better
    }
    if (count > k && count < bracket_.count2) {
      bracket_.t2 = t;
      bracket_.count2 = count;
    }
  }
}

namespace {

const bool mstopk_registered = [] {
  add_selector<MsTopKSelector>("mstopk", "exactly k entries, nearly the largest, by bisection of a threshold",
                               {.at_most_k = true});
  add_sparse("mstopk", "exactly k entries, nearly the largest, by bisection; error feedback keeps the rest",
             {.select = "mstopk"});
  return true;
}();

}  // namespace
}  // namespace topknot
