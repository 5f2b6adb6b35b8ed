#pragma once
// Uniform numbers by position, many at a time: the numbers of CounterRng (nn/core/rng.h), sixteen blocks of
// the generator side by side.

#include <cstddef>
#include <cstdint>

namespace topknot::quantise {

// out[i] = CounterRng(seed, RngUse::compress, low 32 bits of step, rank).uniform(first + i): a stream for each
// rank and step, whose i-th number belongs to the i-th element of the model, whatever the groups are.
void uniforms(std::uint64_t seed, std::int64_t step, int rank, std::uint64_t first, std::size_t count,
              float* out);

}  // namespace topknot::quantise
