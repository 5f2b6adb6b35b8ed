// EF-signSGD: Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes signSGD and other gradient
// compression schemes", ICML 2019, algorithm 1 with several workers: u = gradient + residual; (||u||_1 / d)
// sign(u) is sent; the residual is u minus that. One scale a selection range (compress.scope: tensor is the
// paper's layer-wise form). compress.memory: none is plain scaled sign.
//
// Differences: a bit cannot say zero, so zeros (of either sign) are sent as +scale, as in the 1-bit methods
// of DeepSpeed and GRACE, where the authors' code, which never packs, has sign(0) = 0; error feedback takes
// care of it. The paper's residual holds lr * gradient; ours holds gradients, which is the same at a constant
// rate, and leaves momentum to the optimizer.

#include <cmath>
#include <memory>
#include <vector>

#include "compress/compressor.h"
#include "compress/parallel.h"
#include "compress/quantise/compressor.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

static_assert(quantise::kSumChunk == kChunk, "a GPU adds up the same chunks");

TOPKNOT_MULTIVERSION double sum_magnitudes(const float* x, std::size_t n) {
  constexpr std::size_t lanes = quantise::kSignLanes;
  double sums[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (std::size_t l = 0; l < lanes; ++l) sums[l] += static_cast<double>(std::fabs(x[i + l]));
  for (std::size_t l = 0; i < n; ++i, ++l) sums[l] += static_cast<double>(std::fabs(x[i]));
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

TOPKNOT_MULTIVERSION void signs(const float* x, const float*, std::size_t n, float, std::int16_t* codes) {
  for (std::size_t i = 0; i < n; ++i) codes[i] = x[i] < 0 ? 1 : 0;
}

bool mean_magnitudes(std::span<const float> u, const quantise::Format& format, std::span<float> scales) {
  std::size_t begin = 0;
  for (std::size_t cell = 0; cell < scales.size(); ++cell) {
    const std::size_t n = format.cells[cell] - begin;
    std::vector<double> sums((n + kChunk - 1) / kChunk);
    for_parts(n, part_count(n), [&](std::size_t, std::size_t from, std::size_t to) {
      for (std::size_t i = from; i < to; i += kChunk)
        sums[i / kChunk] = sum_magnitudes(u.data() + begin + i, std::min(kChunk, to - i));
    });
    double total = 0;
    for (const double sum : sums) total += sum;
    scales[cell] = static_cast<float>(total / static_cast<double>(n));
    begin += n;
  }
  return true;
}

std::unique_ptr<Compressor> make_signsgd(const CompressOptions& options, const GroupSpec& group) {
  return std::make_unique<quantise::QuantisingCompressor>(
      quantise::Quantiser{mean_magnitudes, signs, /*random=*/false}, options.seed,
      quantise::signsgd_format(options, group), quantise::signsgd_has_residual(options), group);
}

const bool signsgd_registered =
    compressors().add("signsgd", "signs and one mean magnitude, with error feedback",
                      {make_signsgd, quantise::planned_block_bytes<quantise::signsgd_format>});

}  // namespace

quantise::Format quantise::signsgd_format(const CompressOptions& options, const GroupSpec& group) {
  reject_sparse_options(options, "the sign of every entry", false);
  return {Kind::sign, 1, group.numel, cells_of(group, 0)};
}

}  // namespace topknot
