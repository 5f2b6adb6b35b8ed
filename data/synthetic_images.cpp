// Pictures that need no files: 3 x 32 x 32, ten classes, made to separate methods. The class is the texture
// of one patch: a grating of one of five orientations and two wavelengths (Gabor patch: a cosine under a
// round window). Place, phase, colour and contrast are random, so the mean picture of every class is plain
// grey and a linear model is left near chance, while the first layers of a small convnet find the
// orientations. Each picture also holds two distractors, a patch of rings (all orientations at once) and a
// fainter grating of another class, and noise over everything.
//
// Other sizes are the same picture at another scale (noise is a pixel's at any). With more than ten classes a
// digit of the class is one grating: units in red, tens in green, hundreds in blue.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "data/dataset.h"
#include "nn/base/memory.h"
#include "nn/core/rng.h"

namespace topknot {
namespace {

constexpr int kSide = 32, kChannels = 3;  // the usual side, for which radius and wavelengths are said
constexpr int kRadius = 9;                // of a patch's window, pixels; patches lie wholly inside
constexpr int kAllChannels = -1;
constexpr double kContrast = 0.28;  // amplitude of the class's grating; pictures are in [0, 1]
constexpr double kFaint = 0.35;     // contrast of the misleading grating over the true one's
constexpr double kTurn = 6.283185307179586;

// cos() of an angle in 2^-32 turns, so that phases add as integers; the window over squared distance.
struct Tables {
  std::array<float, 4096> cosine;
  std::vector<float> window;
  explicit Tables(int radius) : window(static_cast<std::size_t>(radius * radius) + 1) {
    for (std::size_t i = 0; i < cosine.size(); ++i)
      cosine[i] =
          static_cast<float>(std::cos(kTurn * static_cast<double>(i) / static_cast<double>(cosine.size())));
    for (std::size_t i = 0; i < window.size(); ++i)
      window[i] =
          static_cast<float>(0.5 + 0.5 * std::cos(0.5 * kTurn * std::sqrt(static_cast<double>(i)) / radius));
  }
  float cos_of(std::uint32_t angle) const { return cosine[angle >> 20]; }
};

std::uint32_t turns(double x) {
  return static_cast<std::uint32_t>(static_cast<std::int64_t>(x * 0x1p32));
}

// Random numbers of one picture in order of use.
class Draws {
 public:
  explicit Draws(const CounterRng& rng) : rng_(rng) {}
  double between(double low, double high) { return low + (high - low) * rng_.uniform(next_++); }
  int below(int n) { return static_cast<int>(rng_.below(next_++, static_cast<std::uint32_t>(n))); }

 private:
  const CounterRng& rng_;
  std::uint64_t next_ = 0;
};

class Painter {
 public:
  Painter(double noise, int side)
      : noise_(static_cast<float>(noise)),
        side_(side),
        radius_(kRadius * side / kSide),
        tables_(radius_),
        canvas_(static_cast<std::size_t>(kChannels * side * side)) {}

  void paint(const CounterRng& rng, int label, int classes, std::uint8_t* picture) {
    Draws draws(rng);
    std::fill(canvas_.begin(), canvas_.end(), 0.5f);
    if (classes <= 10)
      add_patch(draws, label, draws.between(0.8, 1.2) * kContrast);
    else
      for (int channel = 0, rest = label, above = classes - 1; above > 0; ++channel, rest /= 10, above /= 10)
        add_patch(draws, rest % 10, draws.between(0.8, 1.2) * kContrast, channel);
    add_patch(draws, -1, draws.between(0.8, 1.2) * kContrast);
    const int other = (label + 1 + draws.below(classes - 1)) % classes;
    add_patch(draws, other % 10, kFaint * kContrast);
    add_noise(rng);
    for (std::size_t i = 0; i < canvas_.size(); ++i)
      picture[i] = static_cast<std::uint8_t>(std::clamp(canvas_[i], 0.0f, 1.0f) * 255.0f + 0.5f);
  }

 private:
  // Texture 0 .. 9: orientation texture mod 5, wavelength texture / 5; -1: rings.
  void add_patch(Draws& draws, int texture, double contrast, int channel = kAllChannels) {
    const int x0 = radius_ + draws.below(side_ - 2 * radius_ + 1),
              y0 = radius_ + draws.below(side_ - 2 * radius_ + 1);
    const std::uint32_t phase = turns(draws.between(0, 1));
    const bool coarse = texture < 0 ? draws.below(2) == 1 : texture >= 5;
    const double cycles =  // per pixel
        draws.between(0.93, 1.07) / (coarse ? 5.5 : 3.4) * (static_cast<double>(kSide) / side_);
    const double angle = 0.5 * kTurn * ((texture < 0 ? 0 : texture % 5) + draws.between(-0.15, 0.15)) / 5;
    const std::uint32_t across = turns(cycles * std::cos(angle)), down = turns(cycles * std::sin(angle));
    std::array<float, kChannels> colour;
    for (float& c : colour)
      c = static_cast<float>(contrast * draws.between(0.3, 1.0)) * (draws.below(2) ? 1 : -1);
    const int first = channel == kAllChannels ? 0 : channel,
              last = channel == kAllChannels ? kChannels - 1 : channel;

    for (int dy = -radius_; dy <= radius_; ++dy)
      for (int dx = -radius_; dx <= radius_; ++dx) {
        const int x = x0 + dx, y = y0 + dy, distance2 = dx * dx + dy * dy;
        if (distance2 >= radius_ * radius_ || x >= side_ || y >= side_) continue;
        const std::uint32_t turn =
            texture < 0
                ? phase + turns(cycles * std::sqrt(static_cast<double>(distance2)))
                : phase + static_cast<std::uint32_t>(dx) * across + static_cast<std::uint32_t>(dy) * down;
        const float value = tables_.window[static_cast<std::size_t>(distance2)] * tables_.cos_of(turn);
        for (int c = first; c <= last; ++c)
          canvas_[static_cast<std::size_t>((c * side_ + y) * side_ + x)] +=
              colour[static_cast<std::size_t>(c)] * value;
      }
  }

  // The sum of two even byte-valued numbers: standard deviation noise_, bounded, and fast.
  void add_noise(const CounterRng& rng) {
    const float scale = noise_ * 2.449489743f / 256.0f;
    for (std::size_t i = 0; i < canvas_.size(); i += 2) {
      const std::uint32_t bits = rng.bits(64 + i / 2);
      canvas_[i] += scale * (static_cast<float>((bits & 0xff) + (bits >> 8 & 0xff)) - 255.0f);
      if (i + 1 == canvas_.size()) break;
      canvas_[i + 1] += scale * (static_cast<float>((bits >> 16 & 0xff) + (bits >> 24)) - 255.0f);
    }
  }

  const float noise_;
  const int side_, radius_;
  const Tables tables_;
  std::vector<float> canvas_;
};

const Option kClasses{"classes", 10, "of the pictures", 2, 1000};

class SyntheticImages final : public Dataset {
 public:
  SyntheticImages(const DatasetOptions& options, Split split)
      : classes_(options.get<int>(kClasses)), side_(options.get<int>(option::image_size)) {
    if (side_ == 0) side_ = kSide;
    numel_ = std::int64_t{kChannels} * side_ * side_;
    if (side_ < 8)
      throw UserError(fmt::format(
          "data.image_size: {} is out of range; synthetic_images has sides of 8 to 512 pixels", side_));
    const std::int64_t wanted = split == Split::train ? options.train_size : options.test_size;
    size_ = wanted == 0 ? (split == Split::train ? 10000 : 2000) : limited_size(options, split, wanted);
    check_fits(split, size_, numel_);
    with_memory("the pictures of synthetic_images", static_cast<double>(size_ * numel_),
                [&] { pictures_.resize(static_cast<std::size_t>(size_ * numel_)); });
    Painter painter(options.get<std::optional<double>>(option::noise).value_or(0.08), side_);
    for (std::int64_t n = 0; n < size_; ++n)
      painter.paint(CounterRng(options.seed, RngUse::dataset, static_cast<std::uint32_t>(n),
                               split == Split::train ? 0u : 1u),
                    label(n), classes_, pictures_.data() + n * numel_);
  }

  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return size_; }
  Shape sample_shape() const override { return {kChannels, side_, side_}; }
  int classes() const override { return classes_; }
  const std::uint8_t* bytes(std::int64_t index) const override { return pictures_.data() + index * numel_; }
  std::int32_t label(std::int64_t index) const override {
    return static_cast<std::int32_t>(index % classes_);
  }
  std::vector<float> channel_mean() const override { return {0.5f, 0.5f, 0.5f}; }
  std::vector<float> channel_std() const override { return {0.09f, 0.09f, 0.09f}; }

 private:
  const std::string name_ = "synthetic_images";
  int classes_, side_;
  std::int64_t numel_ = 0, size_ = 0;  // numel_: bytes a picture
  std::vector<std::uint8_t> pictures_;
};

const bool synthetic_images_registered = add_dataset<SyntheticImages>(
    "synthetic_images",
    "textured patches in noise, 3 x 32 x 32 and 10 classes or as asked for; needs no files",
    {kClasses, option::image_size, option::noise});

}  // namespace
}  // namespace topknot
