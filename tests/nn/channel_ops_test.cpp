// Ops that move or mask elements, or scale or normalise channels.
#include <optional>

#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// values[n][c][i] of [N, C, pixels].
float& element(std::vector<float>& values, const Shape& shape, std::int64_t n, std::int64_t c,
               std::int64_t pixel) {
  return values[std::size_t((n * shape[1] + c) * shape[2] * shape[3] + pixel)];
}

Layout possible(Layout layout, std::int64_t channels) {
  return channels % channel_block() == 0 ? layout : Layout::plain;
}

struct At {
  std::int64_t n, c, row, column;
};
std::int64_t index(const Shape& shape, const At& at) {
  return ((at.n * shape[1] + at.c) * shape[2] + at.row) * shape[3] + at.column;
}
At position(const Shape& shape, std::int64_t i) {
  const std::int64_t row = i / shape[3], channel = row / shape[2];
  return {channel / shape[1], channel % shape[1], row % shape[2], i % shape[3]};
}

// Element i of the op's value is element source(i) of its input, or `fill` where there is none; gradients go
// back.
void check_moves(const std::function<Variable(const Variable&)>& op, const Shape& in, const Shape& out,
                 const std::function<std::optional<std::int64_t>(std::int64_t)>& source, float fill = 0,
                 bool keeps_layout = true) {
  for (const Layout layout : layouts(in[1])) {
    INFO(in.str() << " to " << out.str() << (layout == Layout::blocked ? ", blocked" : ", plain"));
    Leaf x(in, random_values(in.numel(), 1));
    const Variable y = op(in_layout(x.variable(), layout));
    REQUIRE(y.shape() == out);
    if (keeps_layout && out.rank() == 4) CHECK(y.value().layout() == layout);
    const auto values = values_of(x.variable()), dy = random_values(out.numel(), 2);
    backward(weighted_sum(y, dy));
    std::vector<float> expected(dy.size(), fill), dx(values.size());
    for (std::int64_t i = 0; i < out.numel(); ++i)
      if (const auto from = source(i)) {
        expected[std::size_t(i)] = values[std::size_t(*from)];
        dx[std::size_t(*from)] = dy[std::size_t(i)];
      }
    CHECK((values_of(y) == expected));
    CHECK((x.gradient() == dx));
  }
}

}  // namespace

TEST_CASE("concat puts channels one after the other, and each part takes its gradient") {
  for (const std::vector<std::int64_t>& widths :
       {std::vector<std::int64_t>{16, 32, 16}, {64, 24, 16}, {3, 5}, {7}, {16, 17}})
    for (const Layout layout : {Layout::plain, Layout::blocked})
      for (const int threads : {1, 2}) {
        const Threads scope(threads);
        std::vector<std::unique_ptr<Leaf>> leaves;
        std::vector<Variable> parts;
        std::int64_t channels = 0;
        for (const std::int64_t width : widths) {
          const Shape shape{3, width, 4, 5};
          leaves.push_back(
              std::make_unique<Leaf>(shape, random_values(shape.numel(), std::uint32_t(channels))));
          parts.push_back(in_layout(leaves.back()->variable(), possible(layout, width)));
          channels += width;
        }
        const Shape whole{3, channels, 4, 5};
        INFO(whole.str() << ", first " << widths[0]);
        const Variable y = concat(parts);
        REQUIRE(y.shape() == whole);
        auto dy = random_values(whole.numel(), 99);
        backward(weighted_sum(y, dy));
        auto values = values_of(y);
        std::int64_t first = 0;
        for (std::size_t p = 0; p < widths.size(); ++p) {
          const Shape shape = leaves[p]->variable().shape();
          auto x = values_of(leaves[p]->variable()), dx = leaves[p]->gradient();
          bool same = true;
          for (std::int64_t n = 0; n < 3; ++n)
            for (std::int64_t c = 0; c < widths[p]; ++c)
              for (std::int64_t i = 0; i < 20; ++i)
                same = same && element(values, whole, n, first + c, i) == element(x, shape, n, c, i) &&
                       element(dy, whole, n, first + c, i) == element(dx, shape, n, c, i);
          CHECK(same);
          first += widths[p];
        }
      }
  const Variable a(Tensor::zeros({1, 2, 3, 3})), b(Tensor::zeros({1, 2, 3, 4}));
  CHECK_THROWS_AS(concat({a, b}), Error);
  CHECK_THROWS_AS(concat({}), Error);
}

TEST_CASE("slices of channels take their gradients together; an unused channel's is zero") {
  for (const std::int64_t channels : {32, 24, 64})
    for (const Layout layout : layouts(channels)) {
      const Shape shape{2, channels, 3, 5};
      const std::int64_t half = channels / 2;
      Leaf leaf(shape, random_values(shape.numel(), 1));
      const Variable x = in_layout(leaf.variable(), layout);
      // The first half, the second without its last channel, and the first channel again.
      const std::vector<std::pair<std::int64_t, std::int64_t>> ranges{{0, half}, {half, half - 1}, {0, 1}};
      std::vector<Variable> slices;
      for (const auto& [begin, count] : ranges) slices.push_back(slice_channels(x, begin, count));
      const Variable y = concat(slices);
      auto values = values_of(leaf.variable()), ys = values_of(y), dy = random_values(y.value().numel(), 2);
      backward(weighted_sum(y, dy));
      std::vector<float> expected(values.size()), copied(ys.size());
      std::int64_t at = 0;
      for (const auto& [begin, count] : ranges)
        for (std::int64_t c = begin; c < begin + count; ++c, ++at)
          for (std::int64_t n = 0; n < 2; ++n)
            for (std::int64_t i = 0; i < 15; ++i) {
              element(copied, y.shape(), n, at, i) = element(values, shape, n, c, i);
              element(expected, shape, n, c, i) += element(dy, y.shape(), n, at, i);
            }
      CHECK((ys == copied));
      check_close("dx", leaf.gradient(), as_double(expected), 1e-6);
    }
  CHECK_THROWS_AS(slice_channels(Variable(Tensor::zeros({1, 4, 2, 2})), 2, 3), Error);
}

TEST_CASE("channel_shuffle deals the groups' channels out in turn, and the gradient goes back") {
  for (const auto& [channels, groups] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{32, 2}, {116, 2}, {12, 3}, {16, 1}}) {
    const Shape shape{2, channels, 3, 4};
    check_moves([n = groups](const Variable& x) { return channel_shuffle(x, n); }, shape, shape,
                [&, groups = groups, size = channels / groups](std::int64_t i) {
                  const auto [n, c, row, column] = position(shape, i);
                  return index(shape, {n, c % groups * size + c / groups, row, column});
                },
                0, false);
  }
  CHECK_THROWS_AS(channel_shuffle(Variable(Tensor::zeros({1, 4, 2, 2})), 3), Error);
}

TEST_CASE("pad_end adds rows and columns of one value after the image") {
  for (const auto& [rows, columns] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {0, 2}, {3, 0}}) {
    const Shape in{2, 16, 3, 5}, out{2, 16, 3 + rows, 5 + columns};
    const auto source = [&](std::int64_t i) -> std::optional<std::int64_t> {
      const At at = position(out, i);
      if (at.row >= 3 || at.column >= 5) return {};
      return index(in, at);
    };
    check_moves([r = rows, c = columns](const Variable& x) { return pad_end(x, r, c, -7.0f); }, in, out,
                source, -7.0f);
  }
  const Variable x(Tensor::zeros({1, 2, 3, 3}));
  CHECK(pad_end(x, 0, 0).value().data() == x.value().data());
  CHECK_THROWS_AS(pad_end(x, -1, 0), Error);
}

TEST_CASE("subsample_and_pad takes every second pixel and pads channels on both sides") {
  const std::pair<Shape, std::int64_t> cases[] = {
      {{2, 16, 8, 8}, 32}, {{3, 32, 7, 5}, 64},  {{1, 16, 1, 1}, 16}, {{2, 48, 5, 6}, 64},
      {{2, 16, 4, 3}, 48}, {{2, 64, 3, 3}, 128}, {{5, 4, 3, 7}, 9},   {{2, 3, 4, 4}, 8}};
  for (const auto& [in, channels] : cases) {
    const Shape out{in[0], channels, (in[2] + 1) / 2, (in[3] + 1) / 2};
    const auto source = [&, in = in](std::int64_t i) -> std::optional<std::int64_t> {
      const auto [n, c, row, column] = position(out, i);
      const std::int64_t from = c - (out[1] - in[1]) / 2;
      if (from < 0 || from >= in[1]) return {};
      return index(in, {n, from, 2 * row, 2 * column});
    };
    check_moves([c = channels](const Variable& x) { return subsample_and_pad(x, c); }, in, out, source);
  }
  CHECK_THROWS_AS(subsample_and_pad(Variable(Tensor::zeros({1, 16, 2, 2})), 8), Error);
}

TEST_CASE("flatten gives N, C, H, W order from any layout, and the gradient goes back") {
  check_moves(flatten, {3, 32, 3, 5}, {3, 480}, [](std::int64_t i) { return i; });
  Leaf features({3, 7}, random_values(21, 3));
  CHECK(flatten(features.variable()).shape() == Shape({3, 7}));
}

TEST_CASE("frames_to_rows gives a row per frame, from any layout, and hands gradients back") {
  for (const std::int64_t channels : {1, 3, 32}) {
    const Shape in{2, channels, 5, 4};
    check_moves(frames_to_rows, in, {8, 5 * channels}, [&](std::int64_t i) {
      const std::int64_t row = i / (5 * channels), column = i % (5 * channels);
      return index(in, {row % 2, column / 5, column % 5, row / 2});
    });
  }
  Leaf flat({2, 3}, std::vector<float>(6));
  CHECK_THROWS_AS(frames_to_rows(flat.variable()), Error);
}

TEST_CASE("scale_channels multiplies each channel of each image, and both inputs take their gradients") {
  for (const std::int64_t channels : {32, 24})
    for (const Layout layout : layouts(channels)) {
      const Shape shape{3, channels, 5, 3};
      Leaf x(shape, random_values(shape.numel(), 1)), s({3, channels}, random_values(3 * channels, 2));
      const Variable y = scale_channels(in_layout(x.variable(), layout), s.variable());
      const auto dy = random_values(shape.numel(), 3), xs = values_of(x.variable()),
                 ss = values_of(s.variable());
      backward(weighted_sum(y, dy));
      Array ry(xs.size()), dx(xs.size()), ds(ss.size()), ds_scale(ss.size());
      for (std::size_t i = 0; i < xs.size(); ++i) {
        const std::size_t c = i / 15;
        ry[i] = double(xs[i]) * ss[c];
        dx[i] = double(dy[i]) * ss[c];
        ds[c] += double(dy[i]) * xs[i];
        ds_scale[c] += std::abs(double(dy[i]) * xs[i]);
      }
      check_close("y", values_of(y), ry, 1e-7);
      check_close("dx", x.gradient(), dx, 1e-7);
      check_close("ds", s.gradient(), ds, ds_scale, 1e-6);
    }
  CHECK_THROWS_AS(scale_channels(Variable(Tensor::zeros({2, 4, 3, 3})), Variable(Tensor::zeros({2, 3}))),
                  Error);
}

TEST_CASE("local_response_norm agrees with the formula: sizes, edges, layouts") {
  for (const LrnOptions& o : {LrnOptions{}, LrnOptions{5, 0.02f, 0.75f, 1}, LrnOptions{3, 0.5f, 0.5f, 2},
                              LrnOptions{1, 0.1f, 1, 1}})
    for (const std::int64_t channels : {16, 48, 5, 2})
      for (const Layout layout : layouts(channels)) {
        const Shape shape{2, channels, 3, 5};
        INFO(shape.str() << ", size " << o.size << (layout == Layout::blocked ? ", blocked" : ", plain"));
        auto values = random_values(shape.numel(), 1);
        for (float& v : values) v *= 5;
        Leaf x(shape, values);
        const Variable y = local_response_norm(in_layout(x.variable(), layout), o);
        CHECK(y.value().layout() == layout);
        const auto dy = random_values(shape.numel(), 2);
        backward(weighted_sum(y, dy));
        constexpr std::int64_t kPixels = 15;
        Array ry(values.size()), dx(values.size()), d(values.size()), scale(values.size());
        const auto neighbours = [&](std::int64_t i, auto&& fn) {
          const std::int64_t c = i / kPixels % channels;
          for (std::int64_t j = std::max<std::int64_t>(0, c - o.size / 2);
               j <= std::min(channels - 1, c + o.size / 2); ++j)
            fn(std::size_t(i + (j - c) * kPixels));
        };
        for (std::int64_t i = 0; i < shape.numel(); ++i) {
          const auto at = std::size_t(i);
          double squares = 0;
          neighbours(i, [&](std::size_t j) { squares += double(values[j]) * values[j]; });
          d[at] = o.k + o.alpha * squares;
          ry[at] = values[at] / std::pow(d[at], o.beta);
        }
        for (std::int64_t i = 0; i < shape.numel(); ++i) {
          const auto at = std::size_t(i);
          dx[at] = dy[at] / std::pow(d[at], o.beta), scale[at] = std::abs(dx[at]);
          neighbours(i, [&](std::size_t j) {
            const double term =
                2.0 * o.alpha * o.beta * values[at] * dy[j] * values[j] / std::pow(d[j], o.beta + 1);
            dx[at] -= term, scale[at] += std::abs(term);
          });
        }
        check_close("y", values_of(y), ry, 1e-5);
        check_close("dx", x.gradient(), dx, scale, 1e-5);
      }
  CHECK_THROWS_AS(local_response_norm(Variable(Tensor::zeros({1, 4, 2, 2})), {4, 1, 1, 1}), Error);
}

TEST_CASE("mask_frames puts zeros behind each sequence's frames, in any layout, and masks gradients") {
  constexpr std::int64_t kFrames = 4, kHeight = 3;
  const std::vector<std::int32_t> frames{4, 1, 0};
  const auto n = std::int64_t(frames.size());
  const auto masked = [&](std::vector<float> values, const auto& frame_of) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto [sequence, frame] = frame_of(std::int64_t(i));
      if (frame >= frames[std::size_t(sequence)]) values[i] = 0;
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
        std::vector<float> values(std::size_t(shape.numel())), dy(values.size());
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = float(i % 100 + 1), dy[i] = float(i % 90 + 1);
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
