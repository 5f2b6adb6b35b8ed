#pragma once
// The first bytes of a quantised block (compress/quantise/block.h), and a level's code. For kernels too.

#include <cstdint>

#include "nn/core/host_device.h"

namespace topknot::quantise {

// Magnitudes of signs are summed by chunks of so many entries: kChunk of compress/parallel.h.
inline constexpr std::uint32_t kSumChunk = 16384;

enum class Kind : std::uint8_t { sign = 1, levels = 2, ternary = 3 };

struct BlockHeader {
  static constexpr std::uint32_t kMagic = 0x51544B54;
  static constexpr std::uint8_t kVersion = 1, kFiniteFlag = 1;
  std::uint32_t magic = kMagic;
  std::uint8_t version = kVersion, flags = 0, kind = 0, zero = 0;
  std::uint32_t numel = 0, cells = 0, levels = 0;
};

// QSGD's level of an entry: |x| / norm of `levels`, rounded up where the uniform number is below the fraction. norm > 0.
TOPKNOT_HOST_DEVICE int level_of(float magnitude, float uniform, float norm, float levels) {
  const float share = magnitude / norm;
  const float exact = (share < 1.0f ? share : 1.0f) * levels;
  const int low = static_cast<int>(exact);
  return low + (uniform < exact - static_cast<float>(low) ? 1 : 0);
}

}  // namespace topknot::quantise
