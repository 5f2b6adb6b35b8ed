// Pictures of a file, in every format, whole and damaged, and their resampling. The files in tests/data/images hold
// red = 40 + 4 x, green = 30 + 5 y, blue = 200 - 2 x - 2 y in 36 x 27 pixels; the grey ones their luma, or red alone.
#include "data/image.h"

#include <algorithm>
#include <cmath>

#include "data/dataset.h"
#include "data/resample.h"
#include "nn/core/rng.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

using namespace topknot;

namespace {

constexpr int kWidth = 36, kHeight = 27;
constexpr PixelRect kWhole{0, 0, kWidth, kHeight};

std::vector<std::uint8_t> file_of(const std::string& name) {
  return read_file(TOPKNOT_SOURCE_DIR "/tests/data/images/" + name);
}

int channel(const Picture& p, int x, int y, int c) {
  return p.pixels[static_cast<std::size_t>(y) * p.stride + static_cast<std::size_t>(4 * x + c)];
}

int expected(const std::string& name, int x, int y, int c) {
  const int rgb[] = {40 + 4 * x, 30 + 5 * y, 200 - 2 * x - 2 * y};
  if (name == "grey16.png") return rgb[0];
  if (name == "grey.jpg") return static_cast<int>(0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]);
  return rgb[c];
}

std::vector<std::string> all_files() {
  return {"rgb.jpg",  "progressive.jpg", "grey.jpg",    "cmyk.jpg", "rgb.png",
          "rgba.png", "grey16.png",      "palette.png", "rgb.bmp"};
}

int tolerance(const std::string& name) {
  return name.ends_with(".jpg") ? 8 : name == "palette.png" ? 10 : 0;
}

// A picture of random pixels in memory of its own.
struct Noise {
  std::vector<std::uint8_t> bytes;
  Picture picture;
  Noise(int width, int height, std::uint32_t seed) {
    const CounterRng rng(seed, RngUse::test);
    for (int i = 0; i < 4 * width * height; ++i)
      bytes.push_back(static_cast<std::uint8_t>(rng.below(static_cast<std::uint64_t>(i), 256)));
    picture.pixels = bytes.data();
    picture.stride = static_cast<std::size_t>(4 * width);
    picture.width = width, picture.height = height;
  }
};

// The weight of pixel j for output pixel i of `side`, by the formula.
std::vector<double> triangle(double begin, double end, int size, int side, int i) {
  const double step = (end - begin) / side, reach = std::max(step, 1.0), centre = begin + (i + 0.5) * step;
  std::vector<double> weights(static_cast<std::size_t>(size));
  double sum = 0;
  for (int j = 0; j < size; ++j)
    sum += weights[static_cast<std::size_t>(j)] = std::max(0.0, 1 - std::abs(j + 0.5 - centre) / reach);
  for (double& w : weights) w /= sum;
  return weights;
}

}  // namespace

TEST_CASE("pictures of every format are decoded to RGB, whatever their own colours are") {
  for (const std::string& name : all_files()) {
    const auto file = file_of(name);
    CHECK(image_size(file).width == kWidth);
    CHECK(image_size(file).height == kHeight);
    const Picture picture = decode_image(file, kWhole);
    REQUIRE(picture.width == kWidth);
    REQUIRE(picture.height == kHeight);
    int worst = 0;
    for (int y = 0; y < kHeight; ++y)
      for (int x = 0; x < kWidth; ++x)
        for (int c = 0; c < 3; ++c)
          worst = std::max(worst, std::abs(channel(picture, x, y, c) - expected(name, x, y, c)));
    INFO(name);
    CHECK(worst <= tolerance(name));
  }
}

TEST_CASE("a part of a picture has the pixels that the whole has there") {
  for (const std::string& name : all_files()) {
    const auto file = file_of(name);
    const Picture whole = decode_image(file, kWhole);
    for (const PixelRect& rect :
         {PixelRect{0, 0, 1, 1}, PixelRect{17, 3, 34, 20}, PixelRect{35, 26, 36, 27},
          PixelRect{1, 16, 20, 27}, PixelRect{16, 8, 32, 16}, PixelRect{15, 7, 33, 17}}) {
      const Picture part = decode_image(file, rect);
      REQUIRE(part.left == rect.left);
      REQUIRE(part.top == rect.top);
      REQUIRE(part.width == rect.right - rect.left);
      REQUIRE(part.height == rect.bottom - rect.top);
      int worst = 0;
      for (int y = 0; y < part.height; ++y)
        for (int x = 0; x < part.width; ++x)
          for (int c = 0; c < 3; ++c)
            worst = std::max(
                worst, std::abs(channel(part, x, y, c) - channel(whole, x + rect.left, y + rect.top, c)));
      INFO(name << ' ' << rect.left << ' ' << rect.top);
      CHECK(worst == 0);
    }
  }
}

TEST_CASE("a shrunken picture is the same picture, a pixel for several") {
  const auto file = file_of("rgb.jpg");
  for (const int shrink : {2, 4, 8}) {
    const Picture picture = decode_image(file, {9, 8, 36, 24}, shrink);
    CHECK(picture.shrink == shrink);
    CHECK(picture.left == 9 / shrink);
    CHECK(picture.width == (36 + shrink - 1) / shrink - 9 / shrink);
    CHECK(picture.height == 24 / shrink - 8 / shrink);
    for (int y = 0; y < picture.height; ++y)
      for (int x = 0; x < picture.width; ++x) {
        const double full_x = (picture.left + x + 0.5) * shrink - 0.5;
        if (full_x + shrink / 2.0 > kWidth) continue;  // partly outside
        CHECK(std::abs(channel(picture, x, y, 0) - (40 + 4 * full_x)) <= 10);
      }
  }
}

TEST_CASE("bytes that are no whole picture are refused with the reason") {
  for (const std::string& name : all_files()) {
    const auto file = file_of(name);
    for (const double part : {0.5, 0.9, 0.97}) {
      const std::vector<std::uint8_t> cut(
          file.begin(), file.begin() + static_cast<std::ptrdiff_t>(part * static_cast<double>(file.size())));
      INFO(name << " cut at " << part);
      // Also where a part is wanted that is there.
      CHECK_THROWS_AS(decode_image(cut, {0, 0, 2, 2}), UserError);
    }
  }
  const auto jpeg = file_of("rgb.jpg");
  CHECK(user_error([&] { decode_image({jpeg.data(), jpeg.size() - 30}, kWhole); }, {"cut short"}));
  CHECK(user_error([&] { image_size({jpeg.data(), 40}); }, {"cut short"}));
  CHECK(user_error([] { image_size({}); }, {"it is empty"}));
  const std::string text = "this is no picture";
  const std::vector<std::uint8_t> bytes(text.begin(), text.end());
  CHECK(user_error([&] { image_size(bytes); }, {"no JPEG, PNG, BMP or PNM"}));
  const std::string deep = "P6 3 2 355\n" + std::string(36, 'x');
  CHECK(user_error(
      [&] {
        decode_image(std::vector<std::uint8_t>(deep.begin(), deep.end()), {0, 0, 3, 2});
      },
      {"PNM file of 16 bits"}));
  for (const char* header : {"P6 1111111111 3 255\n", "P5 \n# of 12345678901\n\r# too\n3 2222222222 255\n",
                             "P6 3 2 99999999999\n"}) {
    const std::string long_number = header;
    const std::vector<std::uint8_t> file(long_number.begin(), long_number.end());
    CHECK(user_error([&] { image_size(file); }, {"more than nine digits"}));
    CHECK(user_error([&] { decode_image(file, {0, 0, 1, 1}); }, {"more than nine digits"}));
  }
  const std::string comment = "P5#99999999999\n1 #99999999999\r1 255\nx";
  CHECK(image_size(std::vector<std::uint8_t>(comment.begin(), comment.end())).width == 1);
  const std::string huge = "P6 20000 20000 255\n";
  CHECK(user_error([&] { image_size(std::vector<std::uint8_t>(huge.begin(), huge.end())); },
                   {"20000 x 20000", "100 million"}));
}

TEST_CASE("a JPEG with a Huffman table of too many codes, or that ends with the head of a scan, is refused") {
  const auto file = file_of("rgb.jpg");
  const std::vector<std::uint8_t> marker{0xff, 0xc4};
  const auto table = std::search(file.begin(), file.end(), marker.begin(), marker.end());
  REQUIRE(table != file.end());
  const auto at = static_cast<std::size_t>(table - file.begin());
  auto crowded = file;
  for (std::size_t i = 5; i < 9; ++i) crowded[at + i] = 255;
  const std::vector<std::uint8_t> empty_scan{0xff, 0xd8, 0xff, 0xda, 0, 2};  // at the file's end
  for (const auto& damaged : {crowded, empty_scan}) CHECK_THROWS_AS(decode_image(damaged, kWhole), UserError);
}

TEST_CASE("stray bytes after the end of a JPEG do no harm") {
  auto file = file_of("rgb.jpg");
  file.insert(file.end(), 500, 7);
  CHECK(std::abs(channel(decode_image(file, kWhole), 20, 13, 0) - 120) <= 8);
}

TEST_CASE(
    "resampling agrees with the formula, enlarging, reducing and mirrored, to a rounding of each pass") {
  const int width = 23, height = 17;
  const Noise noise(width, height, 1);
  for (const auto& [box, side] : std::vector<std::pair<PixelBox, int>>{{{0, 0, 23, 17}, 5},
                                                                       {{0, 0, 23, 17}, 40},
                                                                       {{3.25, 1.5, 19.75, 12.25}, 9},
                                                                       {{22, 16, 23, 17}, 3},
                                                                       {{0, 0, 23, 17}, 1}})
    for (const bool flip : {false, true}) {
      std::vector<std::uint8_t> out(static_cast<std::size_t>(3 * side * side));
      resample(noise.picture, box, side, flip, out.data());
      double worst = 0;
      for (int c = 0; c < 3; ++c)
        for (int y = 0; y < side; ++y)
          for (int x = 0; x < side; ++x) {
            const auto across = triangle(box.left, box.right, width, side, x),
                       down = triangle(box.top, box.bottom, height, side, y);
            double value = 0;
            for (int j = 0; j < height; ++j)
              for (int i = 0; i < width; ++i)
                value += across[static_cast<std::size_t>(i)] * down[static_cast<std::size_t>(j)] *
                         channel(noise.picture, i, j, c);
            const int at = flip ? side - 1 - x : x;
            worst =
                std::max(worst, std::abs(out[static_cast<std::size_t>((c * side + y) * side + at)] - value));
          }
      INFO("to " << side << (flip ? ", mirrored" : ""));
      CHECK(worst <= 1.001);
    }
}

TEST_CASE("a box in a part of a picture, or in a shrunken one, is where it is in the whole") {
  const Noise noise(30, 30, 2);
  std::vector<std::uint8_t> whole(3 * 6 * 6), part(whole.size());
  resample(noise.picture, {8, 8, 20, 20}, 6, false, whole.data());
  Noise inner(30, 30, 2);
  inner.picture.pixels += 4 * inner.picture.stride + 4 * 5;
  inner.picture.left = 5, inner.picture.top = 4, inner.picture.width = 20, inner.picture.height = 22;
  resample(inner.picture, {8, 8, 20, 20}, 6, false, part.data());
  CHECK(part == whole);
  Noise half(30, 30, 2);  // the same pixels, of a picture twice as large
  half.picture.shrink = 2;
  resample(half.picture, {16, 16, 40, 40}, 6, false, part.data());
  CHECK(part == whole);
}
