#pragma once
// Counter-based random numbers: the i-th number of a stream is a pure function of (seed, stream, i), so the
// numbers depend neither on the thread count nor on the order of the calls. Philox4x32-10: Salmon, Moraes,
// Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. For CPU loops and CUDA kernels alike.

#include <array>
#include <cmath>
#include <cstdint>

#include "nn/base/host_device.h"

namespace topknot {

struct PhiloxBlock {
  std::uint32_t words[4];
};

TOPKNOT_HOST_DEVICE PhiloxBlock philox_block(PhiloxBlock counter, std::uint32_t key0, std::uint32_t key1) {
  std::uint32_t* c = counter.words;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * c[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ key0;
    c[1] = static_cast<std::uint32_t>(b);
    c[2] = static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ key1;
    c[3] = static_cast<std::uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The numbers that one word gives.
TOPKNOT_HOST_DEVICE float uniform_of(std::uint32_t bits) {  // in [0, 1), 24 bits
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}
TOPKNOT_HOST_DEVICE std::uint32_t below_of(std::uint32_t bits, std::uint32_t n) {  // in [0, n)
  return static_cast<std::uint32_t>((std::uint64_t{bits} * n) >> 32);
}

// A stream: its i-th word is words[i % 4] of block i / 4.
struct PhiloxStream {
  std::uint32_t key0, key1;
  std::uint32_t a, b;
  TOPKNOT_HOST_DEVICE PhiloxBlock block(std::uint64_t j) const {
    return philox_block({{static_cast<std::uint32_t>(j), static_cast<std::uint32_t>(j >> 32), a, b}}, key0,
                        key1);
  }
};

using Philox = std::array<std::uint32_t, 4>;

inline Philox philox4x32(Philox counter, std::array<std::uint32_t, 2> key) {
  const PhiloxBlock block = philox_block({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return {block.words[0], block.words[1], block.words[2], block.words[3]};
}

// The use of a stream of random numbers: the uses are independent under one seed.
enum class RngUse : std::uint32_t { init = 1, shuffle, augment, dropout, dataset, compress, test, sample };

class CounterRng {
 public:
  // `a` and `b` number the stream within its use: (epoch, sample), (step, layer), ...
  CounterRng(std::uint64_t seed, RngUse use, std::uint32_t a = 0, std::uint32_t b = 0)
      : stream_{static_cast<std::uint32_t>(seed),
                static_cast<std::uint32_t>(seed >> 32) ^ (static_cast<std::uint32_t>(use) << 24), a, b} {}

  std::uint32_t bits(std::uint64_t i) const { return stream_.block(i / 4).words[i % 4]; }
  // In [0, 1), 24 bits.
  float uniform(std::uint64_t i) const { return uniform_of(bits(i)); }
  // In [0, n), n > 0; the bias is below 2^-32.
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
