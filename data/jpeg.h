#pragma once
// JPEG by libjpeg-turbo: only the rows and columns that are wanted, at a reduced scale where that is offered. stb_image's
// decoder is left out: damaged files made it write and read past its tables.

#include "data/image.h"

namespace topknot {

bool is_jpeg(FileBytes file);
// As image_size() and decode_image() of data/image.h, of a file that is_jpeg().
ImageSize jpeg_size(FileBytes file);
Picture decode_jpeg(FileBytes file, const PixelRect& rect, int shrink);

}  // namespace topknot
