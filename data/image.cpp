#include "data/image.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/memory.h"

// stb_image decodes PNG and BMP, as the corpora of images have them. GIF, PSD, PIC and TGA stay out: their
// readers have a history of faults. A damaged file is no reason to abort; its assertions do not guard memory.
#define STBI_ASSERT(x) ((void)0)
#define STBI_NO_GIF
#define STBI_NO_HDR
#define STBI_NO_JPEG
#define STBI_NO_LINEAR
#define STBI_NO_PIC
#define STBI_NO_PNM
#define STBI_NO_PSD
#define STBI_NO_STDIO
#define STBI_NO_TGA
#define STB_IMAGE_STATIC
#define STB_IMAGE_IMPLEMENTATION
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include <stb/stb_image.h>
#pragma GCC diagnostic pop

namespace topknot {
namespace {

// stb_image takes a file that ends early for one that goes on with zeros; this sees it ask for more.
struct StbSource {
  FileBytes file;
  std::size_t at = 0;
  bool past_end = false;

  static int read(void* user, char* to, int size) {
    auto& source = *static_cast<StbSource*>(user);
    const std::size_t left = source.file.size() - source.at,
                      count = std::min(left, static_cast<std::size_t>(size));
    if (left == 0) source.past_end = true;
    std::memcpy(to, source.file.data() + source.at, count);
    source.at += count;
    return static_cast<int>(count);
  }
  // Pictures may ask for a step back.
  static void skip(void* user, int count) {
    auto& source = *static_cast<StbSource*>(user);
    const std::int64_t to = static_cast<std::int64_t>(source.at) + count,
                       size = static_cast<std::int64_t>(source.file.size());
    if (to > size) source.past_end = true;
    source.at = static_cast<std::size_t>(std::clamp<std::int64_t>(to, 0, size));
  }
  static int at_end(void* user) {
    const auto& source = *static_cast<StbSource*>(user);
    return source.at == source.file.size();
  }
};
constexpr stbi_io_callbacks kStbCallbacks{StbSource::read, StbSource::skip, StbSource::at_end};

// The kinds of files that lie among pictures and are not read.
std::string foreign_kind(FileBytes file) {
  const std::string_view head(reinterpret_cast<const char*>(file.data()),
                              std::min<std::size_t>(16, file.size()));
  if (head.starts_with("GIF8")) return "a GIF file";
  if (head.starts_with(std::string_view("II*\0", 4)) || head.starts_with(std::string_view("MM\0*", 4)))
    return "a TIFF file";
  if (head.starts_with("RIFF") && head.find("WEBP") == 8) return "a WebP file";
  if (head.find("ftyp") == 4) return "an AVIF or HEIF file";
  return "of no known kind";
}

UserError stb_error(const StbSource& source) {
  const char* reason = stbi_failure_reason();
  if (reason && std::strcmp(reason, "outofmem") == 0) throw OutOfMemory("the pixels of a picture", 0);
  if (source.past_end) return UserError("it is cut short");
  if (reason && std::strcmp(reason, "unknown image type") == 0)
    return UserError("it is " + foreign_kind(source.file) + "; JPEG, PNG, BMP and PNM are read");
  return UserError(fmt::format("it is damaged: {}", reason ? reason : "unknown reason"));
}

// Portable any-maps: P1 to P6, bitmaps, grey and RGB, as text and as bytes (netpbm's pbm(5), pgm(5), ppm(5)).
// Values up to the file's greatest one, 1 to 65535, are scaled to 0 .. 255. A file holds one picture; what is
// after it is ignored.
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
    // Rounds as PIL does: to the nearest, halves to even.
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
  // Skips blanks and comments, which end with a line.
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

bool is_pnm(FileBytes file) {
  return file.size() >= 2 && file[0] == 'P' && std::isdigit(file[1]) != 0;
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
       ++y) {  // rows after the part, too: a file that is cut short is refused
    reader.read_row(row.data());
    if (y < rect.top || y >= rect.bottom) continue;
    for (int x = rect.left; x < rect.right; ++x, to += 4)
      for (std::size_t c = 0; c < 3; ++c)
        to[c] = row[static_cast<std::size_t>(x) * channels + (channels == 3 ? c : 0)];
  }
  return picture;
}

}  // namespace

ImageSize image_size(FileBytes file) {
  StbSource source{file};
  ImageSize size;
  int channels = 0;
  if (file.empty()) throw UserError("it is empty");
  if (is_jpeg(file))
    size = jpeg_size(file);
  else if (is_pnm(file))
    size = PnmReader(file).size;
  else if (!stbi_info_from_callbacks(&kStbCallbacks, &source, &size.width, &size.height, &channels))
    throw stb_error(source);
  if (size.width < 1 || size.height < 1) throw UserError("it is damaged: a picture without pixels");
  if (std::int64_t{size.width} * size.height > kMostPixels)
    throw UserError(fmt::format("its {} x {} pixels are more than {} million", size.width, size.height,
                                kMostPixels / 1'000'000));
  return size;
}

Picture decode_image(FileBytes file, const PixelRect& rect, int shrink) {
  if (is_jpeg(file)) return decode_jpeg(file, rect, shrink);
  if (is_pnm(file)) return decode_pnm(file, rect);
  StbSource source{file};
  ImageSize size;
  int channels = 0;
  Picture picture;
  picture.memory = {
      stbi_load_from_callbacks(&kStbCallbacks, &source, &size.width, &size.height, &channels, 4), std::free};
  if (!picture.memory || source.past_end) throw stb_error(source);
  if (rect.right > size.width || rect.bottom > size.height)
    throw UserError("it is damaged: its size is not the one in its header");
  picture.stride = static_cast<std::size_t>(size.width) * 4;
  picture.pixels = picture.memory.get() + static_cast<std::size_t>(rect.top) * picture.stride +
                   static_cast<std::size_t>(rect.left) * 4;
  picture.left = rect.left, picture.top = rect.top;
  picture.width = rect.right - rect.left, picture.height = rect.bottom - rect.top;
  return picture;
}

}  // namespace topknot
