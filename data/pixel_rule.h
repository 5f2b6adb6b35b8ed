#pragma once
// The transforms of one element, for the loops of data/transforms.cpp and the kernel of data/cuda/device_dataset.cu.

#include <cstdint>

#include "nn/core/rng.h"

namespace topknot {

// Pixels of black on each side before the crop (He et al. 2015, section 4.2).
inline constexpr int kCropPadding = 4;

TOPKNOT_HOST_DEVICE float value_of_byte(std::uint8_t byte) {
  return static_cast<float>(byte) / 255.0f;
}
TOPKNOT_HOST_DEVICE float normalised(float value, float mean, float std) {
  return (value - mean) / std;
}

// Where a sample's crop begins and whether it is mirrored, from the first block of the sample's stream.
struct CropDraw {
  int top, left;
  bool flip;
};
TOPKNOT_HOST_DEVICE CropDraw crop_draw(const PhiloxBlock& block) {
  return {static_cast<int>(below_of(block.words[0], 2 * kCropPadding + 1)),
          static_cast<int>(below_of(block.words[1], 2 * kCropPadding + 1)), below_of(block.words[2], 2) == 1};
}

}  // namespace topknot
