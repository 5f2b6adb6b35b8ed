// The hierarchical sampled selection of Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018,
// arXiv 1712.01887, section 5, as the authors' code has it, dgc/compression.py of
// synxlin/deep-gradient-compression). k = ceil(density * d). A threshold t is the least of the largest
// magnitudes of a strided sample; |u| >= t is selected. Then, at most ten times: more than 1.3 k, and the k
// largest of those selected are sent, exactly (compress.resample; without it t rises by 1.3); fewer than 0.8
// k, and t falls by 0.8. Between k and 1.3 k the first k by position are sent (compress.truncate: lowest),
// which is unjust to late positions, or the k largest (largest). At most k entries are sent, possibly fewer.
//
// Deviations from that code: at density 1 everything is sent; if t cannot rise because it is 0, which means
// more zeros than there is room for, the exact k largest are sent. A vector of zeros sends k zeros, as there.
// A vector that the sample covers whole (d at most 2 / density) is compared with its own k-th magnitude.
//
// The sample starts at word `position` of the stream CounterRng(seed, compress, step, rank), below the
// stride. Nothing is carried from step to step.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "compress/parallel.h"
#include "compress/select/dgc_rule.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"

namespace topknot {
namespace {

using dgc::far_too_few, dgc::far_too_many, dgc::kAdaptations, dgc::selected_count;

// |x| >= t, as a bound for passes that look for key > above; NaN and Inf are found in any case.
MagnitudeKey key_before(float t) {
  return std::min(static_cast<MagnitudeKey>(key_of(t) - 1), kLargestFinite);
}

// Leaves the `count` largest of the keys, the least of them last.
template <class K>
void keep_top(std::vector<K>& keys, std::size_t count) {
  if (keys.size() < count) return;
  std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(count - 1), keys.end(),
                   std::greater<>());
  keys.resize(count);
}

// The `top` largest keys of the samples [first, last), and perhaps some more. In random order few samples
// exceed the bound once the list has been cut a few times.
void sample_part(std::span<const float> u, const FeedbackInput& input, std::size_t begin, std::size_t stride,
                 std::size_t first, std::size_t last, std::size_t top, std::vector<MagnitudeKey>& kept) {
  constexpr std::size_t ahead = 32;
  MagnitudeKey bound = -1;
  for (std::size_t i = first; i < last; ++i) {
    const std::size_t at = begin + i * stride;
    if (i + ahead < last) {
      __builtin_prefetch(u.data() + at + ahead * stride);
      input.prefetch(at + ahead * stride);
    }
    const MagnitudeKey key = key_of(input.made(u, at));
    if (key <= bound) continue;
    kept.push_back(key);
    if (kept.size() < kept.capacity()) continue;
    keep_top(kept, top);
    bound = kept.back();
  }
}

const Option kSampleRatio{"sample_ratio", 0.01, "share of the entries that the threshold is taken from", 0.01,
                          1};
const Option kResample{"resample", true, "exact selection where far too many exceed the threshold"};
const Option kTruncate{.name = "truncate",
                       .standard = "lowest",
                       .help = "which entries are sent where a few too many exceed it",
                       .choices = {"lowest", "largest"}};

class DgcSampledSelector final : public Selector {
 public:
  explicit DgcSampledSelector(const CompressOptions& options)
      : options_(dgc_sampled_options(options)), seed_(options.seed) {}

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    adaptations_ = 0;
    exact_ = false;
    const bool all = step.k == u.size();
    SampleGeometry geometry;
    MagnitudeKey t_key = kLargestFinite;
    if (!all) {
      geometry = sample_geometry(u.size(), step.density, options_.sample_ratio);
      geometry.selects = step.k;
      const CounterRng rng(seed_, RngUse::compress, static_cast<std::uint32_t>(step.step),
                           static_cast<std::uint32_t>(step.rank));
      const std::size_t start =
          geometry.stride == 1 ? 0 : rng.below(step.position, static_cast<std::uint32_t>(geometry.stride));
      t_key = sampled_key(u, input, geometry, start);
    }
    float t = magnitude_of(t_key);
    const std::size_t limit = 4 * step.k + 4096;
    accumulate_and_collect(u, input, all ? kLargestFinite : key_before(t), limit, found_);
    if (!begin_selection(found_.finite(), selected)) return;
    if (all) {
      selected.threshold = static_cast<double>(select_all(u, selected));
      return;
    }
    const std::size_t k = step.k;
    const std::size_t count = geometry.samples < u.size() ? adapt(u, geometry, limit, t)
                              : found_.complete()         ? found_.count()
                                                          : limit + 1;
    selected.threshold = static_cast<double>(t);
    if (exact_ || (count > k && !options_.lowest)) return take_exact(u, key_before(t), k, selected);
    if (!found_.complete()) collect(u, key_before(t), u.size(), found_);
    take_first(k, selected);
  }

 private:
  // The magnitude of rank top_samples in the sample of u + input; a NaN or Inf is above all others.
  MagnitudeKey sampled_key(std::span<const float> u, const FeedbackInput& input,
                           const SampleGeometry& geometry, std::size_t start) {
    const std::size_t samples = (u.size() - start + geometry.stride - 1) / geometry.stride;
    const std::size_t top = geometry.top_samples, parts = part_count(u.size());
    kept_.resize(std::max(kept_.size(), parts));
    for (std::size_t part = 0; part < parts; ++part) {
      kept_[part].clear();
      kept_[part].reserve(2 * top + 64);
    }
    for_parts(samples, parts, [&](std::size_t part, std::size_t first, std::size_t last) {
      sample_part(u, input, start, geometry.stride, first, last, top, kept_[part]);
    });
    for (std::size_t part = 1; part < parts; ++part)
      kept_[0].insert(kept_[0].end(), kept_[part].begin(), kept_[part].end());
    keep_top(kept_[0], top);
    return kept_[0].back();
  }

  // Changes t as the code's loop does and returns how many entries reach it; limit + 1 if they are too many
  // to list. Sets exact_ where the k largest are to be taken in place of all of them.
  std::size_t adapt(std::span<const float> u, const SampleGeometry& geometry, std::size_t limit, float& t) {
    const std::size_t k = geometry.selects;
    for (;; ++adaptations_) {
      const std::size_t count = found_.complete() ? found_.count() : limit + 1;
      const bool many = far_too_many(count, k), few = far_too_few(count, k);
      if ((!many && !few) || adaptations_ == kAdaptations) return count;
      exact_ = many && options_.resample;
      if (exact_) return count;
      const float moved = dgc::moved_threshold(t, many, std::numeric_limits<float>::max());
      if (moved == t) {  // zero and the least denormals
        exact_ = many;
        return count;
      }
      t = moved;
      const MagnitudeKey above = key_before(t);
      if (few || !found_.complete()) {
        collect(u, above, limit, found_);
        continue;
      }
      for (auto& part : found_.parts) {
        std::size_t n = 0;
        for (std::size_t i = 0; i < part.count; ++i) {
          part.index[n] = part.index[i];
          part.value[n] = part.value[i];
          n += key_of(part.value[i]) > above;
        }
        part.count = n;
      }
    }
  }

  void take_exact(std::span<const float> u, MagnitudeKey above, std::size_t k, Selection& selected) {
    exact_ = true;
    const MagnitudeKey kth =
        found_.complete() ? select_from(found_, above, k, selected) : select_exact(u, k, found_, selected);
    selected.threshold = static_cast<double>(magnitude_of(kth));
  }

  void take_first(std::size_t k, Selection& selected) const {
    for (const auto& part : found_.parts) {
      const std::size_t n = std::min(part.count, k - selected.indices.size());
      selected.indices.insert(selected.indices.end(), part.index.get(), part.index.get() + n);
      selected.values.insert(selected.values.end(), part.value.get(), part.value.get() + n);
    }
  }

  DgcSampledOptions options_;
  std::uint64_t seed_;
  Candidates found_;
  std::vector<std::vector<MagnitudeKey>> kept_;  // scratch of the sample, by part
  int adaptations_ = 0;                          // of the last select(): how often the threshold was changed
  bool exact_ = false;
};

const bool dgc_sampled_registered[] = {
    add_selector<DgcSampledSelector>(
        "dgc_sampled", "at most k entries, above a threshold from a sample, adapted (DGC)",
        {.at_most_k = true,
         .target = [](double density, std::size_t d,
                      const CompressOptions&) { return selected_count(density, d); }},
        {kSampleRatio, kResample, kTruncate}),
    // Gradient dropping: entries above a threshold that a sample suggests, with error feedback and the
    // optimizer's ordinary momentum. Aji, Heafield, "Sparse communication for distributed gradient descent",
    // EMNLP 2017; the baseline of table 2 of Lin et al., "Deep Gradient Compression", ICLR 2018. The sample is
    // that paper's (compress.sample_ratio; Aji and Heafield take 0.1 %).
    add_sparse("gradient_dropping",
               "about k entries above a sampled threshold, with error feedback and ordinary momentum",
               {.select = "dgc_sampled", .settings = {{"compress.density", "0.01"}}})};

}  // namespace

SampleGeometry sample_geometry(std::size_t numel, double density, double sample_ratio) {
  TOPKNOT_CHECK(numel >= 1 && density > 0 && sample_ratio > 0, "nothing to sample");
  return dgc::geometry_of(numel, density, sample_ratio);
}

DgcSampledOptions dgc_sampled_options(const CompressOptions& options) {
  return {options.get<double>(kSampleRatio), options.get<bool>(kResample),
          options.get<std::string>(kTruncate) == "lowest"};
}

}  // namespace topknot
