#pragma once
// Checksums: of bytes that come in pieces, and of weights.

#include <cstddef>
#include <cstdint>
#include <span>

#include "nn/base/host_device.h"

namespace topknot {

// A 64-bit hash of bytes that come in pieces: FNV-1a by words of 8 bytes, mixed after each word. It finds
// accidents, not forgery: any change of one word changes it.
class Checksum {
 public:
  void update(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  void word(std::uint64_t value);
  std::uint64_t hash_ = 0xcbf29ce484222325u, length_ = 0;
  std::byte tail_[8] = {};
  std::size_t tail_size_ = 0;
};

// A 64-bit checksum of weights, equal on all ranks, always: the sum of these terms over all elements modulo
// 2^64, whose order does not matter, so threads and GPUs may share it. What the element at `index` (< 2^32)
// adds: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014), one-to-one in (index, bits).
TOPKNOT_HOST_DEVICE std::uint64_t checksum_term(std::uint64_t index, std::uint32_t bits) {
  std::uint64_t x = (index << 32 | bits) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace topknot
