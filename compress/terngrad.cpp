// TernGrad: Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: ternary gradients to reduce communication in
// distributed deep learning", NeurIPS 2017: entries are clipped at compress.clip_sigma standard deviations
// (section 3.3, layer-wise: compress.scope tensor), s is the largest magnitude left, and an entry is sent as
// s sign(x) with probability |x| / s, else as 0. Unbiased for the clipped gradient; clipping trades bias for
// variance, as the paper does; clip_sigma 0 is unbiased.
//
// Differences: the paper's ranks share one s, the largest of all, so that a parameter server can add
// integers; here every rank's message has its own s and is added as floats. The standard deviation is about
// the mean, of the population, as in the authors' code; where it is 0 (one element, a constant) there is no
// clipping, which would lose all of it. Five entries are sent in a byte.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "compress/compressor.h"
#include "compress/parallel.h"
#include "compress/quantise/compressor.h"
#include "compress/select/passes/keys.h"
#include "compress/select/passes/passes.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

const Option kClipSigma{"clip_sigma", 2.5, "clips at so many standard deviations; 0: off", 0, 1e9};

TOPKNOT_MULTIVERSION void draw(const float* x, const float* uniform, std::size_t n, float scale,
                               std::int16_t* codes) {
  for (std::size_t i = 0; i < n; ++i) {
    const int sign = x[i] < 0 ? -1 : 1;
    codes[i] = static_cast<std::int16_t>(uniform[i] < std::fabs(x[i]) / scale ? sign : 0);
  }
}

// The population's standard deviation; 0 for less than two entries.
double deviation(std::span<const float> x) {
  if (x.size() < 2) return 0;
  // Without an addend nothing is written.
  const std::span<float> as_is(const_cast<float*>(x.data()), x.size());
  const double n = static_cast<double>(x.size());
  return accumulate_with_moments(as_is, {}).deviation * std::sqrt((n - 1) / n);
}

void clipped_maxima(std::span<const float> u, const quantise::Format& format, double clip,
                    std::span<float> scales) {
  std::size_t begin = 0;
  for (std::size_t cell = 0; cell < scales.size(); ++cell) {
    const std::size_t n = format.cells[cell] - begin;
    const std::span<const float> x = u.subspan(begin, n);
    std::vector<float> most(part_count(n));
    for_parts(n, most.size(), [&](std::size_t part, std::size_t from, std::size_t to) {
      most[part] = magnitude_of(largest_key(x.data() + from, to - from));
    });
    scales[cell] = *std::max_element(most.begin(), most.end());
    const float bound = clip == 0 ? 0 : static_cast<float>(clip * deviation(x));
    if (bound > 0 && bound < scales[cell]) scales[cell] = bound;
    begin += n;
  }
}

quantise::Format terngrad_format(const CompressOptions& options, const GroupSpec& group) {
  reject_sparse_options(options, "every entry as -s, 0 or s", false);
  if (options.memory == "residual")
    refuse_key(options, "memory", "residual",
               "whose rounding adds more error than it takes away, so that the residual would grow without "
               "bound; use signsgd or qsgd for error feedback");
  return {quantise::Kind::ternary, 1, group.numel, quantise::cells_of(group, 0)};
}

std::unique_ptr<Compressor> make_terngrad(const CompressOptions& options, const GroupSpec& group) {
  const auto scales = [clip = options.get<double>(kClipSigma)](std::span<const float> u,
                                                               const quantise::Format& format,
                                                               std::span<float> of_cells) {
    clipped_maxima(u, format, clip, of_cells);
    return true;
  };
  return std::make_unique<quantise::QuantisingCompressor>(quantise::Quantiser{scales, draw}, options.seed,
                                                          terngrad_format(options, group), false, group);
}

const bool terngrad_registered =
    compressors().add("terngrad", "each entry -s, 0 or s, at random by its magnitude",
                      {make_terngrad, quantise::planned_block_bytes<terngrad_format>}, {kClipSigma});

}  // namespace
}  // namespace topknot
