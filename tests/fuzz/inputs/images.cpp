// Pictures of data.name=image_folder.
#include <algorithm>
#include <vector>

#include "data/image.h"
#include "data/resample.h"
#include "tests/fuzz/inputs/input_target.h"

namespace topknot::fuzz {
namespace {

// A byte for the reduction, two for the part that is wanted; then the file.
void image(Bytes input) {
  constexpr std::size_t kHead = 3;
  if (input.size() < kHead) return;
  const auto head = [&](std::size_t i) { return std::to_integer<int>(input[i]); };
  const FileBytes file{reinterpret_cast<const std::uint8_t*>(input.data()) + kHead, input.size() - kHead};
  const ImageSize size = image_size(file);
  const auto part = [](int byte, int length) {  // not empty
    const int first = static_cast<int>(std::int64_t{byte % 16} * length / 16);
    return std::pair{first,
                     std::min(length, first + 1 + static_cast<int>(std::int64_t{byte / 16} * length / 15))};
  };
  const auto [left, right] = part(head(1), size.width);
  const auto [top, bottom] = part(head(2), size.height);
  const PixelRect rect{left, top, right, bottom};
  const Picture picture = decode_image(file, rect, 1 << (head(0) & 3));
  expect(picture.width >= 1 && picture.height >= 1, "a picture without pixels");
  constexpr int kSide = 7;
  std::vector<std::uint8_t> out(3 * kSide * kSide);
  resample(picture, {double(left), double(top), double(right), double(bottom)}, kSide, false, out.data());
}

const bool images_added = [] {
  input_targets().add("image", "a picture: JPEG, PNG, BMP, PNM", image);
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz
