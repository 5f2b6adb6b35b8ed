#pragma once
// A 64-bit checksum of weights: equal on all ranks, always.

#include <cstddef>
#include <cstdint>

#include "nn/core/host_device.h"

namespace topknot {

// What the element at `index` adds to the checksum, which is the sum over all elements modulo 2^64: its order does not matter,
// so threads and GPUs may share it. The finaliser of SplitMix64 (Steele et al., OOPSLA 2014), which maps different
// (index, bits) to different numbers. `index` < 2^32.
TOPKNOT_HOST_DEVICE std::uint64_t checksum_term(std::uint64_t index, std::uint32_t bits) {
  std::uint64_t x = (index << 32 | bits) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace topknot
