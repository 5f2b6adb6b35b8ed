#pragma once
// Small pictures in a folder per class, as data.name=image_folder reads them.

#include "tests/support/test.h"

namespace topknot {

// A PNM file: red rises with x, green with y, blue is `blue`.
inline std::vector<std::uint8_t> pnm_picture(int width, int height, int blue) {
  const std::string head = "P6 " + std::to_string(width) + " " + std::to_string(height) + " 255\n";
  std::vector<std::uint8_t> content(head.begin(), head.end());
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x)
      for (const int value : {4 * x, 4 * y, blue}) content.push_back(static_cast<std::uint8_t>(value));
  return content;
}

// Three classes of 5, 4 and 3 training pictures and of 2 others; blue numbers the training pictures by tens.
struct PictureFolder : TempFolder {
  PictureFolder() {
    int blue = 0;
    for (int c = 0; c < 3; ++c) {
      const std::string name =
          std::string("class") + static_cast<char>('c' - c);  // not in the order of the names
      for (int i = 0; i < 5 - c; ++i)
        write("train/" + name + "/p" + std::to_string(i) + ".ppm", pnm_picture(40, 30, 10 * ++blue));
      for (int i = 0; i < 2; ++i)
        write("val/" + name + "/v" + std::to_string(i) + ".PPM", pnm_picture(30 + i, 40, 7));
    }
  }
};

}  // namespace topknot
