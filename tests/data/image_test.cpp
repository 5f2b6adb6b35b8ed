// Pictures of a file, in every format, whole and damaged, and their resampling. The files in
// tests/data/images hold red = 40 + 4 x, green = 30 + 5 y, blue = 200 - 2 x - 2 y in 36 x 27 pixels; the grey
// ones their luma, or red alone.
#include "data/image.h"

#include "data/dataset.h"
#include "data/transforms.h"
#include "nn/core/rng.h"
#include "tests/data/small_dataset.h"

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

// The largest difference of a pixel of `picture` from `value`.
template <class Value>
int worst(const Picture& picture, const Value& value) {
  int largest = 0;
  for (int y = 0; y < picture.height; ++y)
    for (int x = 0; x < picture.width; ++x)
      for (int c = 0; c < 3; ++c)
        largest = std::max(largest, std::abs(channel(picture, x, y, c) - value(x, y, c)));
  return largest;
}

int expected(const std::string& name, int x, int y, int c) {
  const int rgb[] = {40 + 4 * x, 30 + 5 * y, 200 - 2 * x - 2 * y};
  if (name == "grey16.png") return rgb[0];
  if (name == "grey.jpg") return static_cast<int>(0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]);
  return rgb[c];
}

std::vector<std::string> all_files() {
  return {"rgb.jpg", "progressive.jpg", "grey.jpg",   "cmyk.jpg",    "ycck.jpg",
          "rgb.png", "rgba.png",        "grey16.png", "palette.png", "rgb.bmp"};
}

std::vector<std::uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

// The values of a PNM file of 3 x 2 pixels: red, green, blue of each, row by row.
std::vector<int> pnm_values(const std::string& content) {
  const auto file = bytes_of(content);
  const ImageSize size = image_size(file);
  REQUIRE(size.width == 3);
  REQUIRE(size.height == 2);
  const Picture whole = decode_image(file, {0, 0, 3, 2}), part = decode_image(file, {1, 1, 3, 2});
  std::vector<int> values;
  for (int y = 0; y < 2; ++y)
    for (int x = 0; x < 3; ++x)
      for (int c = 0; c < 3; ++c) {
        values.push_back(channel(whole, x, y, c));
        if (x > 0 && y > 0) CHECK(channel(part, x - 1, y - 1, c) == values.back());
      }
  return values;
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
  std::vector<double> weights(size);
  double sum = 0;
  for (int j = 0; j < size; ++j) sum += weights[j] = std::max(0.0, 1 - std::abs(j + 0.5 - centre) / reach);
  for (double& w : weights) w /= sum;
  return weights;
}

// The definition, pixel by pixel: pad with black, cut, mirror, normalise.
std::vector<float> reference(const Dataset& dataset, std::int64_t index, const CropFlip& choice) {
  const Shape s = dataset.sample_shape();
  std::vector<float> raw(s.numel()), out;
  dataset.get(index, raw.data());
  for (std::int64_t c = 0; c < s[0]; ++c)
    for (std::int64_t y = 0; y < s[1]; ++y)
      for (std::int64_t x = 0; x < s[2]; ++x) {
        const std::int64_t from_y = y + choice.top - 4,
                           from_x = (choice.flip ? s[2] - 1 - x : x) + choice.left - 4;
        const bool inside = from_y >= 0 && from_y < s[1] && from_x >= 0 && from_x < s[2];
        const float pixel = inside ? raw[(c * s[1] + from_y) * s[2] + from_x] : 0.0f;
        out.push_back((pixel - dataset.channel_mean()[c]) / dataset.channel_std()[c]);
      }
  return out;
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
    INFO(name);
    CHECK(worst(picture, [&](int x, int y, int c) { return expected(name, x, y, c); }) <= tolerance(name));
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
      REQUIRE(part.left + part.width == rect.right);
      REQUIRE(part.top == rect.top);
      REQUIRE(part.top + part.height == rect.bottom);
      INFO(name << ' ' << rect.left << ' ' << rect.top);
      CHECK(worst(part,
                  [&](int x, int y, int c) { return channel(whole, x + rect.left, y + rect.top, c); }) == 0);
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
  CHECK_USER_ERROR(decode_image({jpeg.data(), jpeg.size() - 30}, kWhole), "cut short");
  CHECK_USER_ERROR(image_size({jpeg.data(), 40}), "cut short");
  CHECK_USER_ERROR(image_size({}), "it is empty");
  CHECK_USER_ERROR(image_size(bytes_of("this is no picture")),
                   "of no known kind; JPEG, PNG, BMP and PNM are read");
  for (const auto& [head, kind] : {std::pair{"GIF89a", "GIF"},
                                   {"RIFF....WEBPVP8 ", "WebP"},
                                   {"MM?*", "TIFF"},
                                   {"II*?", "TIFF"},
                                   {"....ftypavif", "AVIF"},
                                   {"P7\nWIDTH 3", "P7"},
                                   {"P8", "P8"},
                                   {"RIFF", "no known kind"},
                                   {"ab", "no known kind"}}) {
    std::string content = head;
    std::replace(content.begin(), content.end(), '?', '\0');
    CHECK_USER_ERROR(image_size(bytes_of(content)), kind);
  }
  const std::string huge = "P6 20000 20000 255\n";
  CHECK_USER_ERROR(image_size(bytes_of(huge)), "20000 x 20000", "100 million");
}

TEST_CASE("PNM files of every kind are read, their values scaled from the greatest one that they may have") {
  const auto grey = [](std::vector<int> of) {
    std::vector<int> values;
    for (const int value : of) values.insert(values.end(), 3, value);
    return values;
  };
  const auto bits = grey({0, 255, 0, 255, 255, 0});
  CHECK(pnm_values("P1\n# bits, 1 is black\n3 2\n1 0 1\n0 01") == bits);
  CHECK(pnm_values("P1 3 2 101001") == bits);
  CHECK(pnm_values("P4 3 2\n\xbf\x20") == bits);
  const auto levels = grey({0, 85, 170, 255, 255, 0});
  CHECK(pnm_values("P2 3 2 3  0 1 2\n3 3 0\n") == levels);
  CHECK(pnm_values(std::string("P5 3 2 3\n\0\1\2\3\3\0", 15)) == levels);
  CHECK(pnm_values("P2 #of 12345678901\r3 #too\n2 65535 0 21845 43690 65535 65535 0") == levels);
  CHECK(pnm_values(std::string("P5 3 2 65535\n\0\0\x55\x55\xaa\xaa\xff\xff\xff\xff\0\0", 25)) == levels);
  CHECK(pnm_values(std::string("P5 3 2 1000\n\0\0\1\xf4\3\xe8\0\1\0\2\0\3", 24)) ==
        grey({0, 128, 255, 0, 1, 1}));
  CHECK(pnm_values("P2 3 2 10 1 3 5 7 9 10") == grey({26, 76, 128, 178, 230, 255}));  // halves to even
  std::vector<int> colours;
  std::string text = "P3 3 2 15", raw = "P6 3 2 15\n", full = "P6 3 2 255\n";
  for (int i = 0; i < 18; ++i) {
    const int value = i * 5 % 16;
    colours.push_back(17 * value);
    text += ' ' + std::to_string(value);
    raw += static_cast<char>(value);
    full += static_cast<char>(17 * value);
  }
  CHECK(pnm_values(text) == colours);
  CHECK(pnm_values(raw) == colours);
  CHECK(pnm_values(full) == colours);
  CHECK(pnm_values(full + "what is behind it") == colours);
}

TEST_CASE("a PNM file that is cut short or damaged is refused with the reason") {
  const auto refused = [](const std::string& content, const std::string& why) {
    const auto file = bytes_of(content);
    CHECK_USER_ERROR(decode_image(file, {0, 0, 1, 1}), why);
  };
  for (const char* whole :
       {"P1 3 2 1 0 1 0 0 1", "P4 3 2\n\xbf\x20", "P2 3 2 3 0 1 2 3 3 0", "P5 3 2 3\n\1\1\2\3\3\1",
        "P3 1 2 3 0 1 2 3 3 0", "P6 1 2 300\n\1\1\1\1\1\1\1\1\1\1\1\1"}) {
    const std::string content = whole;
    for (std::size_t size = 2; size < content.size(); ++size) refused(content.substr(0, size), "cut short");
  }
  refused("P2 3 2 3 0 1 2 3 x 0", "no number");
  refused("P1 3 2 1 0 1 0 0 2", "neither 0 nor 1");
  refused("P5 3 2 0\n??????", "a greatest value of 0");
  refused("P5 3 2 65536\n????????????", "a greatest value of 65536");
  refused("P6 99999 1000 255\n", "cut short");
  for (const char* header : {"P6 1111111111 3 255\n", "P5 \n# of 12345678901\n\r# too\n3 2222222222 255\n",
                             "P6 3 2 99999999999\n"}) {
    refused(header, "more than nine digits");
    CHECK_USER_ERROR(image_size(bytes_of(header)), "more than nine digits");
  }
}

TEST_CASE("a JPEG without Adobe's marker or with stray bytes is read, one with too many codes is not") {
  // Where two bytes stand in a file.
  const auto find = [](const std::vector<std::uint8_t>& file, std::vector<std::uint8_t> marker) {
    const auto at = std::search(file.begin(), file.end(), marker.begin(), marker.end());
    REQUIRE(at != file.end());
    return static_cast<std::size_t>(at - file.begin());
  };
  const auto cmyk = file_of("cmyk.jpg");
  auto bare = cmyk;
  const auto marker = find(cmyk, {0xff, 0xee});
  bare.erase(bare.begin() + marker, bare.begin() + marker + 2 + 256 * cmyk[marker + 2] + cmyk[marker + 3]);
  const Picture with = decode_image(cmyk, kWhole), without = decode_image(bare, kWhole);
  REQUIRE((with.width == kWidth && with.height == kHeight));
  CHECK(worst(with, [&](int x, int y, int c) { return channel(without, x, y, c); }) == 0);

  auto stray = file_of("rgb.jpg"), crowded = stray;
  stray.insert(stray.end(), 500, 7);
  CHECK(std::abs(channel(decode_image(stray, kWhole), 20, 13, 0) - 120) <= 8);

  std::fill_n(crowded.begin() + static_cast<std::ptrdiff_t>(find(crowded, {0xff, 0xc4})) + 5, 4, 255);
  CHECK_THROWS_AS(decode_image(crowded, kWhole), UserError);
  const std::vector<std::uint8_t> empty_scan{0xff, 0xd8, 0xff, 0xda, 0, 2};  // at the file's end
  CHECK_THROWS_AS(decode_image(empty_scan, kWhole), UserError);
}

TEST_CASE("resampling agrees with the formula, larger, smaller and mirrored, to a rounding of each pass") {
  const int width = 23, height = 17;
  const Noise noise(width, height, 1);
  for (const auto& [box, side] : std::vector<std::pair<PixelBox, int>>{{{0, 0, 23, 17}, 5},
                                                                       {{0, 0, 23, 17}, 40},
                                                                       {{3.25, 1.5, 19.75, 12.25}, 9},
                                                                       {{22, 16, 23, 17}, 3},
                                                                       {{0, 0, 23, 17}, 1}})
    for (const bool flip : {false, true}) {
      std::vector<std::uint8_t> out(3 * side * side);
      resample(noise.picture, box, side, flip, out.data());
      double worst = 0;
      for (int c = 0; c < 3; ++c)
        for (int y = 0; y < side; ++y)
          for (int x = 0; x < side; ++x) {
            const auto across = triangle(box.left, box.right, width, side, x),
                       down = triangle(box.top, box.bottom, height, side, y);
            double value = 0;
            for (int j = 0; j < height; ++j)
              for (int i = 0; i < width; ++i) value += across[i] * down[j] * channel(noise.picture, i, j, c);
            const int at = flip ? side - 1 - x : x;
            worst = std::max(worst, std::abs(out[(c * side + y) * side + at] - value));
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

TEST_CASE("crop, mirror and normalise follow their definition for every choice, from bytes and from floats") {
  for (const bool as_bytes : {true, false}) {
    const SmallDataset dataset(4, as_bytes);
    const Transform transform(dataset, true, 1);
    for (int top = 0; top <= 8; ++top)
      for (int left = 0; left <= 8; ++left)
        for (const bool flip : {false, true}) {
          const CropFlip choice{top, left, flip};
          std::vector<float> out(dataset.sample_shape().numel());
          transform.apply(3, choice, out.data());
          CHECK(out == reference(dataset, 3, choice));
        }
  }
  // Pictures smaller than the padding can be shifted wholly out of sight.
  const SmallDataset tiny(2, true, Shape{1, 3, 3}), dataset(4, true);
  const Transform shifted(tiny, true, 1), plain(dataset, false, 1);
  std::vector<float> out(9), whole(dataset.sample_shape().numel());
  for (const auto& choice : {CropFlip{0, 0, false}, CropFlip{8, 8, true}, CropFlip{1, 7, true}}) {
    shifted.apply(1, choice, out.data());
    CHECK(out == reference(tiny, 1, choice));
  }
  // Without augmentation a sample is only normalised, in every epoch.
  for (const int epoch : {0, 7}) {
    plain.apply(2, epoch, whole.data());
    CHECK(whole == reference(dataset, 2, {}));
  }
}

TEST_CASE("random choices follow seed, epoch and sample, and use every shift about equally") {
  CHECK(draw_crop_flip(1, 2, 3) == draw_crop_flip(1, 2, 3));
  int same_epoch = 0, same_sample = 0, same_seed = 0, flips = 0;
  std::map<int, int> tops, lefts;
  for (int i = 0; i < 9000; ++i) {
    const CropFlip choice = draw_crop_flip(1, 2, i);
    same_epoch += choice == draw_crop_flip(1, 3, i);
    same_sample += choice == draw_crop_flip(1, 2, i + 1);
    same_seed += choice == draw_crop_flip(2, 2, i);
    flips += choice.flip;
    ++tops[choice.top];
    ++lefts[choice.left];
  }
  // One in 162 by chance: 56 +- 7.5; five standard deviations for all.
  for (const int same : {same_epoch, same_sample, same_seed}) CHECK(std::abs(same - 56) < 38);
  CHECK(std::abs(flips - 4500) < 240);
  for (const auto* counts : {&tops, &lefts}) {
    CHECK(counts->size() == 9);
    for (const auto& [shift, count] : *counts) {
      CHECK((shift >= 0 && shift <= 8));
      CHECK(std::abs(count - 1000) < 150);
    }
  }
}

TEST_CASE("data.augment asks the data set on auto and rejects what makes no sense") {
  const SmallDataset pictures(2, true);
  const auto vectors = make_dataset("synthetic_regression", {}, Split::test);
  CHECK(resolve_augment("auto", pictures));
  CHECK_FALSE(resolve_augment("false", pictures));
  CHECK(resolve_augment("true", pictures));
  CHECK_FALSE(resolve_augment("auto", *vectors));
  CHECK_USER_ERROR(resolve_augment("true", *vectors), "data.augment", "synthetic_regression");
  CHECK_USER_ERROR(resolve_augment("yes", pictures), "data.augment", "'yes'");
}
