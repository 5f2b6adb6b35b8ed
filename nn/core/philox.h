#pragma once
// Philox4x32-10 and its streams in plain C++17, for CPU loops and CUDA kernels alike: nn/core/rng.h in another form,
// with the same bits. Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

#include <cstdint>

#include "nn/core/host_device.h"

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

}  // namespace topknot
