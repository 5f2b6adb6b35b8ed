#pragma once
// From a stored sample to the model's input: random crop, mirror image, normalisation. Random choices are
// keyed by (seed, epoch, sample), so they do not depend on ranks, worker threads or the order of asking. What
// is of one element serves the loops of data/transforms.cpp and the kernel of data/cuda/device_dataset.cu.

#include <cstdint>
#include <string>
#include <vector>

#include "data/dataset.h"
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

// The origin of a sample's crop and whether it is mirrored, from the first block of the sample's stream.
struct CropDraw {
  int top, left;
  bool flip;
};
TOPKNOT_HOST_DEVICE CropDraw crop_draw(const PhiloxBlock& block) {
  return {static_cast<int>(below_of(block.words[0], 2 * kCropPadding + 1)),
          static_cast<int>(below_of(block.words[1], 2 * kCropPadding + 1)), below_of(block.words[2], 2) == 1};
}

struct CropFlip {
  // Corner in the padded picture, 0 .. 2 * kCropPadding; 4, 4 is no shift.
  int top = kCropPadding, left = kCropPadding;
  bool flip = false;  // mirrored left to right, after the crop
  bool operator==(const CropFlip&) const = default;
};

CropFlip draw_crop_flip(std::uint64_t seed, std::int64_t epoch, std::int64_t sample);

// `data.augment`: auto (asks the set), true, false; UserError for another, and for true without pictures.
bool resolve_augment(const std::string& setting, const Dataset& dataset);

class Transform {
 public:
  Transform(const Dataset& dataset, bool augment, std::uint64_t seed);

  // Writes sample_shape().numel() floats: crop and mirror image if `augment`, then (x - mean) / std a
  // channel. Of a set on demand, what Dataset::decode() found is added to `damaged`.
  void apply(std::int64_t index, std::int64_t epoch, float* out, std::vector<DamagedFile>& damaged) const;
  void apply(std::int64_t index, std::int64_t epoch, float* out) const {
    apply(index, augment_ ? draw_crop_flip(seed_, epoch, index) : CropFlip{}, out);
  }
  // The same before normalisation, for sets that give bytes.
  bool gives_bytes() const { return !of_byte_.empty(); }
  void apply(std::int64_t index, std::int64_t epoch, std::uint8_t* out,
             std::vector<DamagedFile>& damaged) const;
  // The same for a given choice.
  void apply(std::int64_t index, const CropFlip& choice, float* out) const;

 private:
  const Dataset& dataset_;
  const bool augment_;
  const std::uint64_t seed_;
  std::int64_t channels_, height_, width_;
  std::vector<float> mean_, std_;  // one per channel, 0 and 1 if the data set gives none
  std::vector<float> of_byte_;     // [channel][byte]: the normalised value, so that a pixel costs one look-up
};

}  // namespace topknot
