// The uncompressed baseline: gradients are summed by the collective and divided in place. With
// compress.values: bf16 they are rounded to bfloat16 for the way, without error feedback, as PyTorch's
// bf16_compress_hook does; with other value codecs compress/dense.h has the way.
#include <algorithm>
#include <vector>

#include "compress/compressor.h"
#include "compress/dense.h"
#include "compress/parallel.h"
#include "compress/select/passes/keys.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

// x = (x + 0) * factor; returns the largest key of x. Adding 0 turns -0 into +0 as the sparse average does,
// which starts from zeros: so topk of density 1 equals dense bit for bit.
TOPKNOT_MULTIVERSION MagnitudeKey finish(float* x, std::size_t n, float factor) {
  MagnitudeKey largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    largest = std::max(largest, key_of(x[i]));
    x[i] = (x[i] + 0.0f) * factor;
  }
  return largest;
}

class DenseCompressor final : public HostCompressor {
 public:
  DenseCompressor(const GroupSpec& group, bool narrow)
      : HostCompressor(group, false), narrow_(narrow ? group.numel : 0) {}

  Message encode(Slice slice, const StepContext& context) override {
    check_encode(slice, context);
    multiply_all(slice.gradient, weights_[rank_]);
    phase_ = Phase::encoded;
    if (narrow_.empty()) return sum_message(slice.gradient);
    for_parts(numel_, part_count(numel_), [&](std::size_t, std::size_t begin, std::size_t end) {
      to_bfloat16(slice.gradient.data() + begin, end - begin, narrow_.data() + begin);
    });
    Message message;
    message.kind = Message::Kind::sum_bfloat16;
    message.sum_bfloat16 = narrow_;
    return message;
  }

  std::optional<Message> decode(const Round& round) override {
    check_decode();
    float* const gradient = slice_.gradient.data();
    if (narrow_.empty())
      check_sum(round, slice_.gradient);
    else
      TOPKNOT_CHECK(round.sum_bfloat16.data() == narrow_.data(),
                    "the sum is not in the memory that was sent");
    const std::size_t parts = part_count(numel_);
    std::vector<MagnitudeKey> largest(parts);
    for_parts(numel_, parts, [&](std::size_t part, std::size_t begin, std::size_t end) {
      if (!narrow_.empty()) to_float(narrow_.data() + begin, end - begin, gradient + begin);
      largest[part] = finish(gradient + begin, end - begin, 1.0f / static_cast<float>(ranks_));
    });
    finite_ = *std::max_element(largest.begin(), largest.end()) <= kLargestFinite;
    phase_ = Phase::decoded;
    return std::nullopt;
  }

  std::span<float> commit(std::span<const std::uint32_t>) override {
    check_commit();
    phase_ = Phase::idle;
    return average();
  }

  Diagnostics diagnostics() const override { return {.selected = numel_}; }

 private:
  std::vector<BFloat16> narrow_;  // what is sent, if it is not the gradient itself
};

// Validates the options; whether values are sent as bfloat16.
bool is_narrow(const CompressOptions& options) {
  if (!options.memory.empty() && options.memory != "none")
    refuse_key(options, "memory", options.memory,
               "which leaves nothing unsent to remember; remove the key or choose another compressor");
  if (options.lr_inside)
    refuse_key(options, "lr_inside", "true", "which accumulates nothing; remove the key");
  const bool narrow = options.values == "bf16";
  CompressOptions others = options;
  if (narrow) others.values.clear();
  reject_sparse_options(others, "every entry, as sums of fp32 or bf16", true);
  return narrow;
}

std::unique_ptr<Compressor> make_dense(const CompressOptions& options, const GroupSpec& group) {
  if (!sums_plainly(options.name, options.values)) return make_coded_dense(options, group);
  return std::make_unique<DenseCompressor>(group, is_narrow(options));
}

std::size_t dense_bytes(const CompressOptions& options, const GroupSpec& group, double) {
  if (!sums_plainly(options.name, options.values)) return coded_dense_bytes(options, group);
  return group.numel * (is_narrow(options) ? sizeof(BFloat16) : sizeof(float));
}

const bool dense_registered[] = {
    compressors().add("dense", "no compression: gradients are summed as they are",
                      {make_dense, dense_bytes, true}),
    // Douillard et al., arXiv 2311.08105.
    recipes().add("diloco", "DiLoCo: dense, Nesterov's momentum outside; for exchange.every",
                  {"dense",
                   {{"exchange.outer.name", "nesterov"},
                    {"exchange.outer.lr", "0.7"},
                    {"exchange.outer.momentum", "0.9"}}}),
    // Thérien et al., arXiv 2505.23725, with 8 workers.
    recipes().add("muloco", "MuLoCo: dense, Muon inside, Nesterov's momentum outside; for exchange.every",
                  {"dense",
                   {{"optimizer.name", "muon"},
                    {"optimizer.variant", "muloco"},
                    {"exchange.outer.name", "nesterov"},
                    {"exchange.outer.lr", "0.9"},
                    {"exchange.outer.momentum", "0.8"}}})};

}  // namespace
}  // namespace topknot
