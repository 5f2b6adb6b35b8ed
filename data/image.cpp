#include "data/image.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "nn/core/base/check.h"
#include "nn/core/base/memory.h"

// Formats that the corpora of images have. GIF, PSD, PIC and TGA stay out: their readers have a history of faults.
#define STBI_ASSERT(x) \
  ((void)0)  // a damaged file is no reason to abort; what they check is no guard of memory
#define STBI_NO_GIF
#define STBI_NO_HDR
#define STBI_NO_LINEAR
#define STBI_NO_PIC
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

UserError stb_error(const StbSource& source) {
  const char* reason = stbi_failure_reason();
  if (reason && std::strcmp(reason, "outofmem") == 0) throw OutOfMemory("the pixels of a picture", 0);
  if (source.past_end) return UserError("it is cut short");
  if (reason && std::strcmp(reason, "unknown image type") == 0)
    return UserError("it is no JPEG, PNG, BMP or PNM file");
  return UserError(fmt::format("it is damaged: {}", reason ? reason : "unknown reason"));
}

bool is_jpeg(FileBytes file) {
  return file.size() >= 2 && file[0] == 0xff && file[1] == 0xd8;
}

// stb_image writes Huffman tables of more codes than it has room for, and decodes by tables that a file does not give. This
// walks the segments as it does and refuses both.
void check_huffman_tables(FileBytes file) {
  const auto need = [](bool holds) {
    if (!holds) throw UserError("it is damaged: a Huffman table");
  };
  bool given[2][4] = {};  // DC and AC
  bool progressive = false;
  const auto begins_segment = [&](std::size_t i) {
    return file[i] == 0xff && file[i + 1] != 0 && file[i + 1] != 0xff &&
           (file[i + 1] < 0xd0 || file[i + 1] > 0xd7);
  };
  for (std::size_t at = 2;;) {
    while (at + 1 < file.size() && !begins_segment(at))  // past coded pixels and padding
      at = static_cast<std::size_t>(
          std::find(file.begin() + static_cast<std::ptrdiff_t>(at + 1), file.end(), 0xff) - file.begin());
    if (at + 4 > file.size() || file[at + 1] == 0xd9) return;
    const int marker = file[at + 1];
    const std::size_t end = at + 2 + (std::size_t{file[at + 2]} << 8 | file[at + 3]);
    std::size_t i = at + 4;
    if (end > file.size()) throw UserError("it is cut short");
    need(end >= i);
    if (marker == 0xc2) progressive = true;
    if (marker == 0xc4)
      while (i < end) {
        need(i + 17 <= end && file[i] / 16 < 2 && file[i] % 16 < 4);
        const std::size_t codes =
            std::accumulate(file.begin() + static_cast<std::ptrdiff_t>(i + 1),
                            file.begin() + static_cast<std::ptrdiff_t>(i + 17), std::size_t{0});
        need(codes <= 256);
        given[file[i] / 16][file[i] % 16] = true;
        i += 17 + codes;
        need(i <= end);
      }
    if (marker == 0xda) {
      need(i < end);
      const std::size_t components = file[i];
      need(i + 2 * components + 4 <= end);
      const int first = file[i + 1 + 2 * components], refined = file[i + 3 + 2 * components] / 16;
      for (std::size_t c = 0; c < components; ++c) {
        const int tables = file[i + 2 + 2 * c];
        need(tables / 16 < 4 && tables % 16 < 4);
        need(given[0][tables / 16] || (progressive && (first > 0 || refined > 0)));
        need(given[1][tables % 16] || (progressive && first == 0));
      }
    }
    at = end;
  }
}

// stb_image's numbers overflow behind nine digits.
void check_pnm_numbers(FileBytes file) {
  std::size_t i = 2;
  const auto pass = [&](auto&& belongs) {
    const std::size_t begin = i;
    while (i < file.size() && belongs(file[i])) ++i;
    return i - begin;
  };
  for (int number = 0; number < 3; ++number) {  // width, height, greatest value
    while (pass([](std::uint8_t c) { return std::isspace(c) != 0; }) > 0 ||
           (i < file.size() && file[i] == '#'))
      if (i < file.size() && file[i] == '#') pass([](std::uint8_t c) { return c != '\n' && c != '\r'; });
    if (pass([](std::uint8_t c) { return std::isdigit(c) != 0; }) > 9)
      throw UserError("it is damaged: a number of more than nine digits");
  }
}

// Refuses what stb_image would read wrongly.
void check_headers(FileBytes file) {
  if (is_jpeg(file)) check_huffman_tables(file);
  if (file.size() >= 2 && file[0] == 'P') check_pnm_numbers(file);
}

}  // namespace

ImageSize image_size(FileBytes file) {
  StbSource source{file};
  ImageSize size;
  int channels = 0;
  if (file.empty()) throw UserError("it is empty");
  check_headers(file);
  if (!stbi_info_from_callbacks(&kStbCallbacks, &source, &size.width, &size.height, &channels))
    throw stb_error(source);
  if (size.width < 1 || size.height < 1) throw UserError("it is damaged: a picture without pixels");
  if (std::int64_t{size.width} * size.height > kMostPixels)
    throw UserError(fmt::format("its {} x {} pixels are more than {} million", size.width, size.height,
                                kMostPixels / 1'000'000));
  return size;
}

Picture decode_image(FileBytes file, const PixelRect& rect, int shrink) {
  const auto decode = jpeg_decoder().decode;
  return decode && is_jpeg(file) ? decode(file, rect, shrink) : decode_by_stb(file, rect);
}

Picture decode_by_stb(FileBytes file, const PixelRect& rect) {
  StbSource source{file};
  ImageSize size;
  int channels = 0;
  Picture picture;
  check_headers(file);
  // stb_image converts those as if they had 8 bits, and reads past their end.
  if (!file.empty() && file[0] == 'P' && stbi_is_16_bit_from_callbacks(&kStbCallbacks, &source))
    throw UserError("it is a PNM file of 16 bits, and those of 8 bits alone are read");
  source = {file};
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

JpegDecoder& jpeg_decoder() {
  static JpegDecoder decoder;
  return decoder;
}

std::string image_decoders() {
  return jpeg_decoder().name ? fmt::format("{} for JPEG, stb_image", jpeg_decoder().name) : "stb_image";
}

}  // namespace topknot
