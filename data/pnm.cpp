#include "data/pnm.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/memory.h"

namespace topknot {
namespace {

class PnmReader {
 public:
  explicit PnmReader(FileBytes file) : file_(file), kind_(file[1] - '0') {
    if (kind_ < 1 || kind_ > 6)
      throw UserError(fmt::format("it is a PNM file of kind P{}, and P1 to P6 are read", char(file[1])));
    size.width = number();
    size.height = number();
    greatest_ = is_bitmap() ? 1 : number();
    if (greatest_ < 1 || greatest_ > 65535)
      throw UserError(fmt::format("it is damaged: a greatest value of {}", greatest_));
    if (kind_ > 3) next();  // one blank, then bytes
    // As PIL rounds: to the nearest, halves to even.
    for (int value = 0; value <= greatest_; ++value)
      scaled_.push_back(static_cast<std::uint8_t>(std::nearbyint(double(value) / greatest_ * 255)));
  }

  ImageSize size;
  int channels() const { return kind_ % 3 == 0 ? 3 : 1; }
  // Before memory is taken for what a damaged header claims.
  void check_length() const {
    const std::int64_t values = std::int64_t{size.width} * channels(), row = kind_ == 4 ? (values + 7) / 8
                                                                             : kind_ > 4 && greatest_ > 255
                                                                                 ? 2 * values
                                                                                 : values;
    if (row * size.height > static_cast<std::int64_t>(file_.size() - at_)) throw UserError("it is cut short");
  }

  // A row of a pixel's values after the other, scaled.
  void read_row(std::uint8_t* out) {
    const int count = size.width * channels();
    for (int i = 0; i < count; ++i) {
      if (kind_ == 1) {
        skip_blanks();
        const int digit = next();
        if (digit != '0' && digit != '1') throw UserError("it is damaged: a bit that is neither 0 nor 1");
        *out++ = digit == '1' ? 0 : 255;
      } else if (kind_ == 4) {
        if (i % 8 == 0) bits_ = next();
        *out++ = bits_ >> (7 - i % 8) & 1 ? 0 : 255;
      } else {
        const int value = kind_ < 4 ? number() : greatest_ < 256 ? next() : 256 * next() + next();
        *out++ = scaled_[static_cast<std::size_t>(std::min(value, greatest_))];
      }
    }
  }

 private:
  bool is_bitmap() const { return kind_ == 1 || kind_ == 4; }

  int next() {
    if (at_ == file_.size()) throw UserError("it is cut short");
    return file_[at_++];
  }
  // Of blanks and of comments, which end with a line.
  void skip_blanks() {
    bool comment = false;
    for (; at_ < file_.size(); ++at_) {
      const int c = file_[at_];
      if (c == '#') comment = true;
      if (c == '\n' || c == '\r') comment = false;
      if (!comment && std::isspace(c) == 0) return;
    }
  }
  int number() {
    constexpr std::size_t kMostDigits = 9;
    skip_blanks();
    int value = 0;
    const std::size_t begin = at_;
    for (; at_ < file_.size() && std::isdigit(file_[at_]) != 0; ++at_) {
      if (at_ - begin == kMostDigits) throw UserError("it is damaged: a number of more than nine digits");
      value = 10 * value + file_[at_] - '0';
    }
    if (at_ == begin) throw UserError(at_ == file_.size() ? "it is cut short" : "it is damaged: no number");
    return value;
  }

  FileBytes file_;
  std::size_t at_ = 2;
  int kind_, greatest_, bits_ = 0;
  std::vector<std::uint8_t> scaled_;
};

}  // namespace

bool is_pnm(FileBytes file) {
  return file.size() >= 2 && file[0] == 'P' && std::isdigit(file[1]) != 0;
}

ImageSize pnm_size(FileBytes file) {
  return PnmReader(file).size;
}

Picture decode_pnm(FileBytes file, const PixelRect& rect) {
  PnmReader reader(file);
  reader.check_length();
  const auto width = static_cast<std::size_t>(reader.size.width);
  const auto channels = static_cast<std::size_t>(reader.channels());
  Picture picture;
  picture.width = rect.right - rect.left, picture.height = rect.bottom - rect.top;
  picture.left = rect.left, picture.top = rect.top;
  picture.stride = 4 * static_cast<std::size_t>(picture.width);
  auto* to =
      static_cast<std::uint8_t*>(std::malloc(picture.stride * static_cast<std::size_t>(picture.height)));
  picture.memory = {to, std::free};
  if (!to) throw OutOfMemory("the pixels of a picture", 0);
  picture.pixels = to;
  std::vector<std::uint8_t> row(width * channels);
  for (int y = 0; y < reader.size.height;
       ++y) {  // rows behind the part, too: a file that is cut short is refused
    reader.read_row(row.data());
    if (y < rect.top || y >= rect.bottom) continue;
    for (int x = rect.left; x < rect.right; ++x, to += 4)
      for (std::size_t c = 0; c < 3; ++c)
        to[c] = row[static_cast<std::size_t>(x) * channels + (channels == 3 ? c : 0)];
  }
  return picture;
}

}  // namespace topknot
