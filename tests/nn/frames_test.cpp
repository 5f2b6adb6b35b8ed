#include "nn/ops/kernels.h"

#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE("frames_to_rows gives a row per frame, from any layout, and hands gradients back") {
  for (const Layout layout : {Layout::plain, Layout::blocked})
    for (const std::int64_t channels : {1, 3, 32}) {
      if (layout == Layout::blocked && channels < 32) continue;  // no whole blocks
      const Shape shape{2, channels, 5, 4};
      Leaf x(shape, random_values(shape.numel(), 1));
      const Variable in("layout", to_layout(x.variable().value(), layout), {x.variable()},
                        [&](Tensor grad) { x.variable().accumulate_grad(to_layout(grad, Layout::plain)); });
      const Variable rows = frames_to_rows(in);
      REQUIRE(rows.shape() == Shape({8, 5 * channels}));
      const auto values = values_of(x.variable()), got = values_of(rows),
                 dy = random_values(shape.numel(), 2);
      std::vector<float> expected(got.size()), gradient(got.size());
      for (std::int64_t n = 0; n < 2; ++n)
        for (std::int64_t c = 0; c < channels; ++c)
          for (std::int64_t h = 0; h < 5; ++h)
            for (std::int64_t t = 0; t < 4; ++t) {
              const auto at = static_cast<std::size_t>(((n * channels + c) * 5 + h) * 4 + t),
                         row = static_cast<std::size_t>((t * 2 + n) * 5 * channels + c * 5 + h);
              expected[row] = values[at];
              gradient[at] = dy[row];
            }
      CHECK(got == expected);
      backward(weighted_sum(rows, dy));
      CHECK(x.gradient() == gradient);
    }
  Leaf flat({2, 3}, std::vector<float>(6));
  CHECK_THROWS_AS(frames_to_rows(flat.variable()), Error);
}

TEST_CASE(
    "mask_frames puts zeros behind the frames of each sequence, in pictures of any layout and in rows, and "
    "masks gradients") {
  constexpr std::int64_t kFrames = 4, kHeight = 3;
  const std::vector<std::int32_t> frames{4, 1, 0};
  const auto n = static_cast<std::int64_t>(frames.size());
  const auto masked = [&](std::vector<float> values, const auto& frame_of) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto [sequence, frame] = frame_of(static_cast<std::int64_t>(i));
      if (frame >= frames[static_cast<std::size_t>(sequence)]) values[i] = 0;
    }
    return values;
  };
  for (const DType type : {DType::f32, DType::bf16})
    for (const Layout layout : {Layout::plain, Layout::blocked})
      for (const std::int64_t channels : {1, 32}) {
        if (layout == Layout::blocked && channels == 1) continue;  // no whole blocks
        const Shape shape{n, channels, kHeight, kFrames};
        const auto frame_of = [&](std::int64_t i) {
          return std::pair(i / (channels * kHeight * kFrames), i % kFrames);
        };
        // Whole numbers that bfloat16 holds.
        std::vector<float> values(static_cast<std::size_t>(shape.numel())), dy(values.size());
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = static_cast<float>(i % 100 + 1), dy[i] = static_cast<float>(i % 90 + 1);
        Leaf x(shape, values);
        const Variable y = cast(mask_frames(cast(in_layout(x.variable(), layout), type), frames), DType::f32);
        CHECK(y.value().layout() == layout);
        CHECK(values_of(in_layout(y, Layout::plain)) == masked(values, frame_of));
        backward(weighted_sum(in_layout(y, Layout::plain), dy));
        CHECK(x.gradient() == masked(dy, frame_of));
      }

  const auto row_of = [&](std::int64_t i) { return std::pair(i / 2 % n, i / 2 / n); };
  const auto values = random_values(kFrames * n * 2, 1), dy = random_values(kFrames * n * 2, 2);
  Leaf rows({kFrames * n, 2}, values);
  const Variable y = mask_frames(rows.variable(), frames);
  CHECK(values_of(y) == masked(values, row_of));
  backward(weighted_sum(y, dy));
  CHECK(rows.gradient() == masked(dy, row_of));

  CHECK(mask_frames(rows.variable(), {}).value().data() == rows.variable().value().data());
  const std::vector<std::int32_t> beyond{4, 5, 0}, too_few{4, 1};
  CHECK_THROWS_AS(mask_frames(rows.variable(), beyond), Error);
  Leaf pictures({n, 1, 1, kFrames}, std::vector<float>(kFrames * n));
  CHECK_THROWS_AS(mask_frames(pictures.variable(), too_few), Error);
}

TEST_CASE("rows_to_images keeps the values, flatten is its way back") {
  Leaf x({3, 2}, {1, 2, 3, 4, 5, 6});
  const Variable images = rows_to_images(x.variable());
  CHECK(images.shape() == Shape({3, 2, 1, 1}));
  const Variable back = flatten(images);
  CHECK(values_of(back) == values_of(x.variable()));
  backward(weighted_sum(back, {6, 5, 4, 3, 2, 1}));
  CHECK((x.gradient() == std::vector<float>{6, 5, 4, 3, 2, 1}));
}
