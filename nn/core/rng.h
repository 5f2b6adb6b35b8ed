#pragma once
// Counter-based random numbers: the i-th number of a stream is a pure function of (seed, stream, i), so the
// same numbers come out whatever the thread count or the order of asking. Philox4x32-10: Salmon, Moraes,
// Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

#include <array>
#include <cmath>
#include <cstdint>

namespace topknot {

using Philox = std::array<std::uint32_t, 4>;

inline Philox philox4x32(Philox counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// What a stream of random numbers is for; one value for each use keeps the uses independent under one seed.
enum class RngUse : std::uint32_t { init = 1, shuffle, augment, dropout, dataset, compress, test };

class CounterRng {
 public:
  // `a` and `b` number the stream within its use: (epoch, sample), (step, layer), ...
  CounterRng(std::uint64_t seed, RngUse use, std::uint32_t a = 0, std::uint32_t b = 0)
      : key_{static_cast<std::uint32_t>(seed),
             static_cast<std::uint32_t>(seed >> 32) ^ (static_cast<std::uint32_t>(use) << 24)},
        a_(a),
        b_(b) {}

  std::uint32_t bits(std::uint64_t i) const { return block(i / 4)[i % 4]; }
  // In [0, 1), 24 bits.
  float uniform(std::uint64_t i) const { return static_cast<float>(bits(i) >> 8) * 0x1p-24f; }
  // In [0, n), n > 0, without modulo bias worth naming (2^-32).
  std::uint32_t below(std::uint64_t i, std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{bits(i)} * n) >> 32);
  }
  // Standard normal by Box and Muller: the i-th number uses half of the (i/2)-th pair.
  float normal(std::uint64_t i) const {
    const Philox r = block(i / 2);
    const double u = (static_cast<double>(r[0]) + 1.0) * 0x1p-32, v = static_cast<double>(r[1]) * 0x1p-32;
    const double radius = std::sqrt(-2.0 * std::log(u)), angle = 6.283185307179586 * v;
    return static_cast<float>(i % 2 ? radius * std::sin(angle) : radius * std::cos(angle));
  }

 private:
  Philox block(std::uint64_t j) const {
    return philox4x32({static_cast<std::uint32_t>(j), static_cast<std::uint32_t>(j >> 32), a_, b_}, key_);
  }
  std::array<std::uint32_t, 2> key_;
  std::uint32_t a_, b_;
};

}  // namespace topknot
