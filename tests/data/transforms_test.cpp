// Crop, mirror image, normalisation.
#include "data/transforms.h"

#include <map>

#include "tests/data/small_dataset.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

using namespace topknot;

namespace {

// The definition, pixel by pixel: pad with black, cut, mirror, normalise.
std::vector<float> reference(const Dataset& dataset, std::int64_t index, const CropFlip& choice) {
  const Shape s = dataset.sample_shape();
  std::vector<float> raw(static_cast<std::size_t>(s.numel())), out;
  dataset.get(index, raw.data());
  for (std::int64_t c = 0; c < s[0]; ++c)
    for (std::int64_t y = 0; y < s[1]; ++y)
      for (std::int64_t x = 0; x < s[2]; ++x) {
        const std::int64_t from_y = y + choice.top - 4,
                           from_x = (choice.flip ? s[2] - 1 - x : x) + choice.left - 4;
        const bool inside = from_y >= 0 && from_y < s[1] && from_x >= 0 && from_x < s[2];
        const float pixel =
            inside ? raw[static_cast<std::size_t>((c * s[1] + from_y) * s[2] + from_x)] : 0.0f;
        out.push_back((pixel - dataset.channel_mean()[static_cast<std::size_t>(c)]) /
                      dataset.channel_std()[static_cast<std::size_t>(c)]);
      }
  return out;
}

}  // namespace

TEST_CASE("crop, mirror and normalise follow their definition for every choice, from bytes and from floats") {
  for (const bool as_bytes : {true, false}) {
    const SmallDataset dataset(4, as_bytes);
    const Transform transform(dataset, true, 1);
    for (int top = 0; top <= 8; ++top)
      for (int left = 0; left <= 8; ++left)
        for (const bool flip : {false, true}) {
          const CropFlip choice{top, left, flip};
          std::vector<float> out(static_cast<std::size_t>(dataset.sample_shape().numel()));
          transform.apply(3, choice, out.data());
          CHECK(out == reference(dataset, 3, choice));
        }
  }
}

TEST_CASE("pictures smaller than the padding can be shifted wholly out of sight") {
  const SmallDataset dataset(2, true, Shape{1, 3, 3});
  const Transform transform(dataset, true, 1);
  std::vector<float> out(9);
  for (const auto& choice : {CropFlip{0, 0, false}, CropFlip{8, 8, true}, CropFlip{1, 7, true}}) {
    transform.apply(1, choice, out.data());
    CHECK(out == reference(dataset, 1, choice));
  }
}

TEST_CASE("without augmentation a sample is only normalised, in every epoch") {
  const SmallDataset dataset(4, true);
  const Transform transform(dataset, false, 1);
  std::vector<float> out(static_cast<std::size_t>(dataset.sample_shape().numel()));
  for (const int epoch : {0, 7}) {
    transform.apply(2, epoch, out.data());
    CHECK(out == reference(dataset, 2, {}));
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
  CHECK(user_error([&] { resolve_augment("true", *vectors); }, {"data.augment", "synthetic_regression"}));
  CHECK(user_error([&] { resolve_augment("yes", pictures); }, {"data.augment", "'yes'"}));
}
