#include "data/image.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "data/jpeg.h"
#include "data/pnm.h"
#include "nn/base/check.h"
#include "nn/base/memory.h"

// Formats that the corpora of images have. GIF, PSD, PIC and TGA stay out: their readers have a history of faults.
#define STBI_ASSERT(x) \
  ((void)0)  // a damaged file is no reason to abort; what they check is no guard of memory
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

}  // namespace

ImageSize image_size(FileBytes file) {
  StbSource source{file};
  ImageSize size;
  int channels = 0;
  if (file.empty()) throw UserError("it is empty");
  if (is_jpeg(file))
    size = jpeg_size(file);
  else if (is_pnm(file))
    size = pnm_size(file);
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
