#pragma once
// A part of a picture at another size: bilinear with antialiasing, as PIL (Image.BILINEAR) and so torchvision do it.

#include <cstdint>

#include "data/image.h"

namespace topknot {

// Of a picture at its full size; corners may lie between pixels.
struct PixelBox {
  double left = 0, top = 0, right = 0, bottom = 0;
};

// Writes the `box` as side * side pixels in [3][side][side], mirrored left to right where `flip`. A pixel is the mean of
// those around its centre in the box, by a triangle as wide as two of its own steps, or two pixels where it enlarges; the
// picture's edge ends the triangle. Horizontally first, then vertically, each rounded to 8 bits.
void resample(const Picture& picture, const PixelBox& box, int side, bool flip, std::uint8_t* out);

}  // namespace topknot
