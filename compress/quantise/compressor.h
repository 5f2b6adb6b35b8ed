#pragma once
// A quantiser as a compressor: every entry is sent in a few bits (compress/quantise/block.h), gathered from
// all ranks. The average is sum_r(weight[r] * value_r) * (1 / P), added in rank order onto zeros, as that of
// sparse contributions is. With memory residual, u = gradient + residual is quantised and the residual is u
// minus what the other ranks decoded; with none, the gradient, and the slice's residual is never touched.
// Nothing else is carried: random numbers are streams by (step, rank) and position.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "compress/compressor.h"
#include "compress/quantise/block.h"

namespace topknot::quantise {

// The rounding that a method is.
struct Quantiser {
  // Sets the scales of the cells, at least 0; false if an entry is, or a scale would be, no finite number.
  std::function<bool(std::span<const float> u, const Format& format, std::span<float> scales)> scales;
  // Sets the codes of n entries of a cell, on any thread. `uniform`: n numbers in [0, 1); null if not random.
  std::function<void(const float* x, const float* uniform, std::size_t n, float scale, std::int16_t* codes)>
      codes;
  bool random = true;  // and all codes of a scale of 0 are 0
};

class QuantisingCompressor final : public HostCompressor {
 public:
  // `seed`: of the random numbers.
  QuantisingCompressor(Quantiser quantiser, std::uint64_t seed, Format format, bool residual,
                       const GroupSpec& group);

  Message encode(Slice slice, const StepContext& context) override;
  std::optional<Message> decode(const Round& round) override;
  std::span<float> commit(std::span<const std::uint32_t> rejected) override;
  std::optional<SparseView> contributed() const override;
  Diagnostics diagnostics() const override {
    return {.selected = format_.numel, .accumulated = slice_.gradient};
  }

 private:
  void set_codes(std::span<const float> u, std::size_t begin, std::size_t end, float scale,
                 const StepContext& context, std::int16_t* codes) const;

  const Quantiser quantiser_;
  const std::uint64_t seed_;
  Format format_;
  std::uint64_t offset_ = 0;
  std::vector<std::vector<std::byte>> blocks_;  // by rank, between decode and commit
  mutable std::vector<float> contributed_;      // decoded if somebody asks
};

// One cell per selection range, each cut into buckets if `bucket` is above 0.
std::vector<std::uint32_t> cells_of(const GroupSpec& group, std::size_t bucket);

// CompressorType::message_bytes of the method whose checked options give this format.
template <Format (*format)(const CompressOptions&, const GroupSpec&)>
std::size_t planned_block_bytes(const CompressOptions& options, const GroupSpec& group, double) {
  return format(options, group).bytes();
}

// The blocks of the methods that also have kernels. Throw UserError as make_compressor() does.
Format signsgd_format(const CompressOptions& options, const GroupSpec& group);  // compress/signsgd.cpp
Format qsgd_format(const CompressOptions& options, const GroupSpec& group);     // compress/qsgd.cpp

// Whether the method of these options keeps what rounding takes away.
inline bool signsgd_has_residual(const CompressOptions& options) {
  return options.memory != "none";
}
inline bool qsgd_has_residual(const CompressOptions& options) {
  return options.memory == "residual";
}

// out[i] = CounterRng(seed, RngUse::compress, low 32 bits of step, rank).uniform(first + i): a stream for
// each rank and step, whose i-th number belongs to the i-th element of the model, whatever the groups are.
void uniforms(std::uint64_t seed, std::int64_t step, int rank, std::uint64_t first, std::size_t count,
              float* out);

}  // namespace topknot::quantise
