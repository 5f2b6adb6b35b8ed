#pragma once
// Uniform numbers by position, many at a time: the numbers of CounterRng (nn/core/rng.h), sixteen blocks of
// the generator side by side.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "compress/compressor.h"

namespace topknot::quantise {

// out[i] = CounterRng(seed, RngUse::compress, low 32 bits of step, rank).uniform(first + i): a stream for each
// rank and step, whose i-th number belongs to the i-th element of the model, whatever the groups are.
void uniforms(std::uint64_t seed, std::int64_t step, int rank, std::uint64_t first, std::size_t count,
              float* out);

// The codes of entries [begin, end) of u by rounding(entries, uniforms, count, codes), with the numbers from
// `first` on; all 0 where the scale is.
template <class Rounding>
void draw_codes(std::span<const float> u, std::size_t begin, std::size_t end, float scale, std::uint64_t seed,
                const StepInfo& info, std::uint64_t first, std::int16_t* codes, Rounding&& rounding) {
  if (scale == 0) {
    std::fill_n(codes, end - begin, std::int16_t{0});
    return;
  }
  constexpr std::size_t piece = 512;
  float uniform[piece];
  for (std::size_t i = begin; i < end; i += piece) {
    const std::size_t n = std::min(piece, end - i);
    uniforms(seed, info.step, info.rank, first + (i - begin), n, uniform);
    rounding(u.data() + i, uniform, n, codes + (i - begin));
  }
}

}  // namespace topknot::quantise
