#pragma once
// From a stored sample to the model's input: random crop, mirror image, normalisation. Random
// choices are keyed by (seed, epoch, sample), so they do not depend on ranks, worker threads or the order of
// asking.

#include <cstdint>
#include <string>
#include <vector>

#include "data/dataset.h"
#include "data/pixel_rule.h"

namespace topknot {

struct CropFlip {
  // Corner in the padded picture, 0 .. 2 * kCropPadding; 4, 4 is no shift.
  int top = kCropPadding, left = kCropPadding;
  bool flip = false;  // mirrored left to right, after the crop
  bool operator==(const CropFlip&) const = default;
};

CropFlip draw_crop_flip(std::uint64_t seed, std::int64_t epoch, std::int64_t sample);

// `data.augment`: "auto" asks the data set. UserError for another word than auto, true, false, and for true
// where the samples are not pictures.
bool resolve_augment(const std::string& setting, const Dataset& dataset);

class Transform {
 public:
  Transform(const Dataset& dataset, bool augment, std::uint64_t seed);

  // Writes sample_shape().numel() floats: crop and mirror image where `augment`, then (x - mean) / std a
  // channel. Of a set on demand, what Dataset::decode() found is added to `damaged`.
  void apply(std::int64_t index, std::int64_t epoch, float* out, std::vector<DamagedFile>& damaged) const;
  void apply(std::int64_t index, std::int64_t epoch, float* out) const;
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
  std::vector<float> mean_, std_;  // one per channel, 0 and 1 where the data set gives none
  std::vector<float> of_byte_;     // [channel][byte]: the normalised value, so that a pixel costs one look-up
};

}  // namespace topknot
