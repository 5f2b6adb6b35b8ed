#pragma once
// Portable any-maps: P1 to P6, bitmaps, grey and RGB, as text and as bytes (netpbm's pbm(5), pgm(5), ppm(5)). Values up to
// the file's greatest one, 1 to 65535, are scaled to 0 .. 255. A file holds one picture; what is behind it is ignored.

#include "data/image.h"

namespace topknot {

// Begins as a PNM file does: P and a digit.
bool is_pnm(FileBytes file);
// As image_size() and decode_image() of data/image.h, of a file that is_pnm().
ImageSize pnm_size(FileBytes file);
Picture decode_pnm(FileBytes file, const PixelRect& rect);

}  // namespace topknot
