#pragma once
// Pictures from the bytes of a file: JPEG, PNG, BMP and PNM, told apart by their content. Grey and CMYK
// become RGB, alpha is dropped, 16 bits become 8, and EXIF's orientation is not applied.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace topknot {

using FileBytes = std::span<const std::uint8_t>;

struct ImageSize {
  int width = 0, height = 0;
};

// A rectangle of a picture at its full size: columns [left, right), rows [top, bottom).
struct PixelRect {
  int left = 0, top = 0, right = 0, bottom = 0;
};

// Pixels of 4 bytes: red, green, blue and one without a meaning. (x, y) is at pixels + y * stride + 4 * x.
struct Picture {
  using Memory = std::unique_ptr<std::uint8_t, void (*)(void*)>;
  Memory memory{nullptr, nullptr};
  const std::uint8_t* pixels = nullptr;
  std::size_t stride = 0;  // bytes from row to row
  int width = 0, height = 0;
  // Pixel (0, 0) covers shrink * shrink pixels of the picture at full size, from (left, top) * shrink on.
  int left = 0, top = 0, shrink = 1;
};

// UserError without a file's name: an unknown format, cut short or damaged, more than kMostPixels.
inline constexpr std::int64_t kMostPixels = 100'000'000;
ImageSize image_size(FileBytes file);
// The pixels of `rect`, which lies within the picture and is not empty. `shrink`, 1, 2, 4 or 8, may be taken
// as an offer: then a pixel is the mean of as many squared, about, and decoding is quicker.
Picture decode_image(FileBytes file, const PixelRect& rect, int shrink = 1);

// The same of a JPEG file (data/jpeg.cpp).
bool is_jpeg(FileBytes file);
ImageSize jpeg_size(FileBytes file);
Picture decode_jpeg(FileBytes file, const PixelRect& rect, int shrink);

// A box of a picture at its full size; corners may lie between pixels.
struct PixelBox {
  double left = 0, top = 0, right = 0, bottom = 0;
};

// Writes the `box` at another size, bilinear with antialiasing as PIL (Image.BILINEAR) and so torchvision do
// it: side * side pixels in [3][side][side], mirrored left to right if `flip`. A pixel is the mean of those
// around its centre in the box, by a triangle as wide as two of its own steps, or two pixels where it
// enlarges; the picture's edge ends the triangle. First horizontally, then vertically, each in 8 bits.
void resample(const Picture& picture, const PixelBox& box, int side, bool flip, std::uint8_t* out);

}  // namespace topknot
