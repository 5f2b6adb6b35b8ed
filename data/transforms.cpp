#include "data/transforms.h"

#include <algorithm>

namespace topknot {
namespace {

// out(y, x) = value(source(y + top - padding, x + left - padding)), black outside, mirrored if asked.
template <class T, class Value, class Out>
void map_channel(const T* source, std::int64_t height, std::int64_t width, const CropFlip& choice, Out black,
                 Value value, Out* out) {
  const std::int64_t dy = choice.top - kCropPadding, dx = choice.left - kCropPadding;
  const std::int64_t first = std::clamp<std::int64_t>(-dx, 0, width),
                     last = std::clamp<std::int64_t>(width - dx, 0, width);
  for (std::int64_t y = 0; y < height; ++y, out += width) {
    const std::int64_t from = y + dy;
    if (from < 0 || from >= height) {
      std::fill_n(out, width, black);
      continue;
    }
    const T* row = source + from * width + dx;
    std::fill(out, out + first, black);
    for (std::int64_t x = first; x < last; ++x) out[x] = value(row[x]);
    std::fill(out + last, out + width, black);
    if (choice.flip) std::reverse(out, out + width);
  }
}

CounterRng numbers_of(std::uint64_t seed, std::int64_t epoch, std::int64_t sample) {
  return {seed, RngUse::augment, static_cast<std::uint32_t>(epoch), static_cast<std::uint32_t>(sample)};
}

}  // namespace

CropFlip draw_crop_flip(std::uint64_t seed, std::int64_t epoch, std::int64_t sample) {
  const CropDraw draw = crop_draw(numbers_of(seed, epoch, sample).stream().block(0));
  return {draw.top, draw.left, draw.flip};
}

bool resolve_augment(const std::string& setting, const Dataset& dataset) {
  if (setting == "auto") return dataset.augment_helps();
  if (setting == "false") return false;
  if (setting != "true")
    throw UserError("data.augment: '" + setting + "' is not known; give auto, true or false");
  if (dataset.task() != Task::classification)
    throw UserError("data.augment: '" + dataset.name() +
                    "' has no pictures to crop or mirror; give auto or false");
  return true;
}

Transform::Transform(const Dataset& dataset, bool augment, std::uint64_t seed)
    : dataset_(dataset),
      augment_(augment),
      seed_(seed),
      mean_(dataset.channel_mean()),
      std_(dataset.channel_std()) {
  const Shape shape = dataset.sample_shape();
  channels_ = shape[0];
  height_ = shape[1];
  width_ = shape[2];
  if (mean_.empty()) mean_.assign(static_cast<std::size_t>(channels_), 0.0f);
  if (std_.empty()) std_.assign(static_cast<std::size_t>(channels_), 1.0f);
  TOPKNOT_CHECK(static_cast<std::int64_t>(mean_.size()) == channels_ && mean_.size() == std_.size(),
                "one mean and one standard deviation per channel");
  if (dataset.on_demand() || (dataset.size() > 0 && dataset.bytes(0)))
    for (std::size_t c = 0; c < mean_.size(); ++c)
      for (int byte = 0; byte < 256; ++byte)
        of_byte_.push_back(normalised(value_of_byte(static_cast<std::uint8_t>(byte)), mean_[c], std_[c]));
}

void Transform::apply(std::int64_t index, std::int64_t epoch, float* out,
                      std::vector<DamagedFile>& damaged) const {
  if (!dataset_.on_demand()) return apply(index, epoch, out);
  const std::int64_t area = height_ * width_;
  std::vector<std::uint8_t> pixels(static_cast<std::size_t>(channels_ * area));
  apply(index, epoch, pixels.data(), damaged);
  const std::uint8_t* from = pixels.data();
  for (std::int64_t c = 0; c < channels_; ++c) {
    const float* of_byte = of_byte_.data() + 256 * c;
    for (const std::uint8_t* end = from + area; from < end; ++from) *out++ = of_byte[*from];
  }
}

void Transform::apply(std::int64_t index, std::int64_t epoch, std::uint8_t* out,
                      std::vector<DamagedFile>& damaged) const {
  if (dataset_.on_demand()) {
    const CounterRng random = numbers_of(seed_, epoch, index);
    dataset_.decode(index, augment_ ? &random : nullptr, out, damaged);
    return;
  }
  const CropFlip choice = augment_ ? draw_crop_flip(seed_, epoch, index) : CropFlip{};
  const std::int64_t area = height_ * width_;
  for (std::int64_t c = 0; c < channels_; ++c)
    map_channel(
        dataset_.bytes(index) + c * area, height_, width_, choice, std::uint8_t{0},
        [](std::uint8_t b) { return b; }, out + c * area);
}

void Transform::apply(std::int64_t index, const CropFlip& choice, float* out) const {
  const std::int64_t area = height_ * width_;
  const std::uint8_t* bytes = dataset_.bytes(index);
  std::vector<float> raw;
  if (!bytes) {
    raw.resize(static_cast<std::size_t>(channels_ * area));
    dataset_.get(index, raw.data());
  }
  for (std::int64_t c = 0; c < channels_; ++c, out += area) {
    const float mean = mean_[static_cast<std::size_t>(c)], std = std_[static_cast<std::size_t>(c)];
    const float black = normalised(0.0f, mean, std);
    if (bytes) {
      const float* of_byte = of_byte_.data() + 256 * c;
      map_channel(
          bytes + c * area, height_, width_, choice, black, [&](std::uint8_t b) { return of_byte[b]; }, out);
    } else {
      map_channel(
          raw.data() + c * area, height_, width_, choice, black,
          [&](float x) { return normalised(x, mean, std); }, out);
    }
  }
}

}  // namespace topknot
