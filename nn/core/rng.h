#pragma once
// Counter-based random numbers: the i-th number of a stream is a pure function of (seed, stream, i), so the
// same numbers come out whatever the thread count or the order of asking. Philox4x32-10: Salmon, Moraes,
// Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

#include <array>
#include <cmath>
#include <cstdint>

#include "nn/core/philox.h"

namespace topknot {

using Philox = std::array<std::uint32_t, 4>;

inline Philox philox4x32(Philox counter, std::array<std::uint32_t, 2> key) {
  const PhiloxBlock block = philox_block({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return {block.words[0], block.words[1], block.words[2], block.words[3]};
}

// What a stream of random numbers is for; one value for each use keeps the uses independent under one seed.
enum class RngUse : std::uint32_t { init = 1, shuffle, augment, dropout, dataset, compress, test };

class CounterRng {
 public:
  // `a` and `b` number the stream within its use: (epoch, sample), (step, layer), ...
  CounterRng(std::uint64_t seed, RngUse use, std::uint32_t a = 0, std::uint32_t b = 0)
      : stream_{static_cast<std::uint32_t>(seed),
                static_cast<std::uint32_t>(seed >> 32) ^ (static_cast<std::uint32_t>(use) << 24), a, b} {}

  std::uint32_t bits(std::uint64_t i) const { return stream_.block(i / 4).words[i % 4]; }
  // In [0, 1), 24 bits.
  float uniform(std::uint64_t i) const { return uniform_of(bits(i)); }
  // In [0, n), n > 0, without modulo bias worth naming (2^-32).
  std::uint32_t below(std::uint64_t i, std::uint32_t n) const { return below_of(bits(i), n); }
  // Standard normal by Box and Muller: the i-th number uses half of the (i/2)-th pair.
  float normal(std::uint64_t i) const {
    const PhiloxBlock r = stream_.block(i / 2);
    const double u = (static_cast<double>(r.words[0]) + 1.0) * 0x1p-32,
                 v = static_cast<double>(r.words[1]) * 0x1p-32;
    const double radius = std::sqrt(-2.0 * std::log(u)), angle = 6.283185307179586 * v;
    return static_cast<float>(i % 2 ? radius * std::sin(angle) : radius * std::cos(angle));
  }

  // For kernels, which draw the same numbers from it.
  const PhiloxStream& stream() const { return stream_; }

 private:
  PhiloxStream stream_;
};

}  // namespace topknot
