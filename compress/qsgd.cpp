// QSGD: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization
// and encoding", NeurIPS 2017, section 3.1: a bucket v of compress.bucket entries is sent as its L2 norm and,
// for each entry, a sign and a level l of s = compress.levels: floor(s |v_i| / ||v||), or one more with the
// probability of the fraction. Unbiased; the variance is at most min(d / s^2, sqrt(d) / s) ||v||^2 for
// buckets of d (lemma 3.1).
//
// Differences: codes are of fixed width (1 + bits of s), not Elias-coded (section 3.2), which pays at few
// levels; buckets begin anew in each selection range; a zero bucket is zeros, where the formula divides zero
// by zero. The norm is rounded up to float, so that no entry exceeds it; if it is beyond float, the step is
// not finite. The paper has no error feedback, nor has this by default; compress.memory: residual is taken
// where the bound of the lemma is below 1, so that the residual cannot grow without bound.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "compress/compressor.h"
#include "compress/parallel.h"
#include "compress/quantise/compressor.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

const Option kLevels{"levels", 127, "quantisation levels", 1, 32767};
const Option kBucket{"bucket", 128, "elements that share a norm", 1, 1e9};

TOPKNOT_MULTIVERSION double sum_squares(const float* x, std::size_t n) {
  constexpr std::size_t lanes = quantise::kLevelLanes;
  double sums[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (std::size_t l = 0; l < lanes; ++l)
      sums[l] += static_cast<double>(x[i + l]) * static_cast<double>(x[i + l]);
  for (std::size_t l = 0; i < n; ++i, ++l) sums[l] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

TOPKNOT_MULTIVERSION void levels_of(const float* x, const float* uniform, std::size_t n, float norm, float s,
                                    std::int16_t* codes) {
  for (std::size_t i = 0; i < n; ++i) {
    const int level = quantise::level_of(std::fabs(x[i]), uniform[i], norm, s);
    codes[i] = static_cast<std::int16_t>(x[i] < 0 ? -level : level);
  }
}

bool norms_of(std::span<const float> u, const quantise::Format& format, std::span<float> scales) {
  const std::size_t cells = scales.size(), threads = part_count(u.size());
#pragma omp parallel for num_threads(static_cast <int>(threads)) schedule(static) if (threads > 1)
  for (std::size_t cell = 0; cell < cells; ++cell) {
    const std::size_t begin = cell == 0 ? 0 : format.cells[cell - 1];
    const double norm = std::sqrt(sum_squares(u.data() + begin, format.cells[cell] - begin));
    float rounded = static_cast<float>(norm);
    if (static_cast<double>(rounded) < norm)
      rounded = std::nextafter(rounded, std::numeric_limits<float>::infinity());
    scales[cell] = rounded;
  }
  return std::all_of(scales.begin(), scales.end(), [](float norm) { return std::isfinite(norm); });
}

std::unique_ptr<Compressor> make_qsgd(const CompressOptions& options, const GroupSpec& group) {
  const auto levels = static_cast<float>(options.get<int>(kLevels));
  const auto codes = [levels](const float* x, const float* uniform, std::size_t n, float norm,
                              std::int16_t* out) { levels_of(x, uniform, n, norm, levels, out); };
  return std::make_unique<quantise::QuantisingCompressor>(quantise::Quantiser{norms_of, codes}, options.seed,
                                                          quantise::qsgd_format(options, group),
                                                          quantise::qsgd_has_residual(options), group);
}

const bool qsgd_registered =
    compressors().add("qsgd", "stochastic rounding to a few levels of a bucket's norm, unbiased",
                      {make_qsgd, quantise::planned_block_bytes<quantise::qsgd_format>}, {kLevels, kBucket});

}  // namespace

quantise::Format quantise::qsgd_format(const CompressOptions& options, const GroupSpec& group) {
  reject_sparse_options(options, "every entry at a quantised magnitude", false);
  const int levels = options.get<int>(kLevels), bucket = options.get<int>(kBucket);
  const double s = levels, d = bucket;
  if (qsgd_has_residual(options) && std::min(d / (s * s), std::sqrt(d) / s) >= 1)
    refuse_key(options, "memory", "residual",
               "which with so few levels for such buckets adds more error than it takes away, so that the "
               "residual may grow without bound; set compress.levels above the root of compress.bucket, or "
               "memory none");
  return {Kind::levels, static_cast<std::uint32_t>(levels), group.numel,
          cells_of(group, static_cast<std::size_t>(bucket))};
}

}  // namespace topknot
