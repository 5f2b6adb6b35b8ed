#include "nn/ops/frames.h"

#include "nn/ops/layout.h"
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

TEST_CASE("rows_to_images keeps the values, flatten is its way back") {
  Leaf x({3, 2}, {1, 2, 3, 4, 5, 6});
  const Variable images = rows_to_images(x.variable());
  CHECK(images.shape() == Shape({3, 2, 1, 1}));
  const Variable back = flatten(images);
  CHECK(values_of(back) == values_of(x.variable()));
  backward(weighted_sum(back, {6, 5, 4, 3, 2, 1}));
  CHECK((x.gradient() == std::vector<float>{6, 5, 4, 3, 2, 1}));
}
