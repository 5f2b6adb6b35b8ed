// JPEG by libjpeg-turbo: only the rows and columns that are wanted, at a reduced scale if that is offered.
// stb_image's decoder is left out: damaged files made it write and read past its tables.

#include <setjmp.h>
#include <stdio.h>  // which jpeglib.h needs and does not include

#include <jpeglib.h>

#include <jerror.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "data/image.h"
#include "nn/base/check.h"
#include "nn/base/memory.h"

namespace topknot {
namespace {

constexpr int kMostScans = 200;  // of a progressive file, which has 10; each costs a pass over the picture

// libjpeg's callbacks; errors jump back, so nothing with a destructor may live between setjmp() and here.
struct JpegErrors {
  jpeg_error_mgr manager;  // first: libjpeg knows its address alone
  jmp_buf back;
  bool cut_short, damaged;
  char text[JMSG_LENGTH_MAX];

  static JpegErrors& of(j_common_ptr info) { return *reinterpret_cast<JpegErrors*>(info->err); }
  [[noreturn]] static void end(j_common_ptr info) {
    JpegErrors& errors = of(info);
    info->err->format_message(info, errors.text);
    longjmp(errors.back, 1);
  }
  // Level -1 is a warning: libjpeg goes on with what it makes up. Those by which pixels are lost count; stray
  // bytes between markers, which some cameras leave, do not.
  static void note(j_common_ptr info, int level) {
    if (level >= 0) return;
    JpegErrors& errors = of(info);
    switch (info->err->msg_code) {
      case JWRN_JPEG_EOF:
      case JWRN_HIT_MARKER:
        errors.cut_short = true;
        break;
      case JWRN_HUFF_BAD_CODE:
      case JWRN_MUST_RESYNC:
      case JWRN_BOGUS_PROGRESSION:
        errors.damaged = true;
        break;
    }
  }
};

struct JpegWork {
  JpegErrors errors;
  jpeg_progress_mgr progress;
  jpeg_decompress_struct info;
  FileBytes file;
  PixelRect rect;
  int shrink;
  std::uint8_t* memory = nullptr;
  std::size_t stride = 0;
  int first_column = 0;  // of `memory`, in pixels of the shrunken picture
};

// Ink to light. Files hold the complements, as Adobe's, even without Adobe's marker, as PIL has it.
void cmyk_to_rgb(std::uint8_t* pixels, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i, pixels += 4)
    for (int c = 0; c < 3; ++c) pixels[c] = static_cast<std::uint8_t>((pixels[c] * pixels[3] + 127) / 255);
}

int down(int value, int by) {
  return value / by;
}
int up(int value, int by) {
  return (value + by - 1) / by;
}

// Whether the marker of the end is where it should be, some padding aside. A file without it is decoded to
// the end, so that one that is cut short is found whatever part of it is wanted.
bool ends_well(FileBytes file) {
  constexpr std::size_t kPadding = 64;
  const FileBytes tail = file.last(std::min(kPadding, file.size()));
  for (std::size_t i = 0; i + 1 < tail.size(); ++i)
    if (tail[i] == 0xff && tail[i + 1] == JPEG_EOI) return true;
  return false;
}

void read_header(JpegWork& work) {
  jpeg_create_decompress(&work.info);
  jpeg_mem_src(&work.info, work.file.data(), static_cast<unsigned long>(work.file.size()));
  jpeg_read_header(&work.info, TRUE);
}

void read_pixels(JpegWork& work) {
  read_header(work);
  jpeg_decompress_struct& info = work.info;
  info.progress = &work.progress;
  work.progress.progress_monitor = [](j_common_ptr common) {
    const auto* decompress = reinterpret_cast<j_decompress_ptr>(common);
    if (decompress->input_scan_number > kMostScans) ERREXIT(common, JERR_BAD_PROGRESSION);
  };
  if (work.rect.right > static_cast<int>(info.image_width) ||
      work.rect.bottom > static_cast<int>(info.image_height))
    ERREXIT(&info, JERR_BAD_CROP_SPEC);
  const bool inks = info.jpeg_color_space == JCS_CMYK || info.jpeg_color_space == JCS_YCCK;
  info.out_color_space = inks ? JCS_CMYK : JCS_EXT_RGBX;
  info.scale_num = 1;
  info.scale_denom = static_cast<unsigned>(work.shrink);
  jpeg_start_decompress(&info);

  // Chroma is interpolated from neighbours: two columns more on each side give the whole picture's pixels.
  constexpr int kMargin = 2;
  const int width = static_cast<int>(info.output_width);
  const int left = std::max(0, down(work.rect.left, work.shrink) - kMargin),
            right = std::min(width, up(work.rect.right, work.shrink) + kMargin);
  JDIMENSION x = static_cast<JDIMENSION>(left), columns = static_cast<JDIMENSION>(right - left);
  if (right - left < width)
    jpeg_crop_scanline(&info, &x, &columns);
  else
    x = 0;
  const auto top = static_cast<JDIMENSION>(down(work.rect.top, work.shrink)),
             bottom =
                 std::min(info.output_height, static_cast<JDIMENSION>(up(work.rect.bottom, work.shrink)));
  work.first_column = static_cast<int>(x);
  work.stride = std::size_t{info.output_width} * 4;
  work.memory =
      static_cast<std::uint8_t*>(std::malloc(work.stride * (bottom - top + 1)));  // and a row for the rest
  if (!work.memory) ERREXIT1(&info, JERR_OUT_OF_MEMORY, 0);
  if (top > 0) jpeg_skip_scanlines(&info, top);
  const JDIMENSION end = ends_well(work.file) ? bottom : info.output_height;
  while (info.output_scanline < end) {
    JSAMPROW rows[16];
    const JDIMENSION from = info.output_scanline - top,
                     count = std::min<JDIMENSION>(std::size(rows), end - info.output_scanline);
    for (JDIMENSION i = 0; i < count; ++i)
      rows[i] = work.memory + work.stride * std::min(from + i, bottom - top);
    jpeg_read_scanlines(&info, rows, count);
  }
  if (inks) cmyk_to_rgb(work.memory, std::size_t{info.output_width} * (bottom - top));
}

// Does `step` on the file. Its memory belongs to the caller, whatever happens; throws what was wrong.
void run(JpegWork& work, void (*step)(JpegWork&), Picture::Memory& memory) {
  work.info.err = jpeg_std_error(&work.errors.manager);
  work.errors.manager.error_exit = JpegErrors::end;
  work.errors.manager.emit_message = JpegErrors::note;
  bool failed = true;
  if (setjmp(work.errors.back) == 0) {
    step(work);
    failed = false;
  }
  jpeg_destroy_decompress(&work.info);
  memory = {work.memory, std::free};
  if (failed && work.info.err->msg_code == JERR_OUT_OF_MEMORY)
    throw OutOfMemory("the pixels of a picture", 0);
  if (work.errors.cut_short) throw UserError("it is cut short");
  if (failed) throw UserError(std::string("it is damaged: ") + work.errors.text);
  if (work.errors.damaged) throw UserError("it is damaged: a part cannot be decoded");
}

}  // namespace

bool is_jpeg(FileBytes file) {
  return file.size() >= 2 && file[0] == 0xff && file[1] == 0xd8;
}

ImageSize jpeg_size(FileBytes file) {
  JpegWork work{};
  work.file = file;
  Picture::Memory none{nullptr, nullptr};
  run(work, read_header, none);
  return {static_cast<int>(work.info.image_width), static_cast<int>(work.info.image_height)};
}

Picture decode_jpeg(FileBytes file, const PixelRect& rect, int shrink) {
  JpegWork work{};
  work.file = file, work.rect = rect, work.shrink = shrink;
  Picture picture;
  run(work, read_pixels, picture.memory);
  picture.shrink = shrink;
  picture.left = down(rect.left, shrink), picture.top = down(rect.top, shrink);
  picture.width = up(rect.right, shrink) - picture.left;
  picture.height = up(rect.bottom, shrink) - picture.top;
  picture.stride = work.stride;
  picture.pixels = work.memory + 4 * static_cast<std::size_t>(picture.left - work.first_column);
  return picture;
}

}  // namespace topknot
