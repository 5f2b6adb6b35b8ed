// Ops that move, scale or normalise channels: concat, slice_channels, channel_shuffle, pad_end,
// scale_channels, local_response_norm.
#include <cmath>

#include "nn/ops/ops.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// values[n][c][i] of [N, C, pixels].
float& element(std::vector<float>& values, const Shape& shape, std::int64_t n, std::int64_t c,
               std::int64_t pixel) {
  return values[static_cast<std::size_t>((n * shape[1] + c) * shape[2] * shape[3] + pixel)];
}

Layout possible(Layout layout, std::int64_t channels) {
  return channels % channel_block() == 0 ? layout : Layout::plain;
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
          leaves.push_back(std::make_unique<Leaf>(
              shape, random_values(shape.numel(), static_cast<std::uint32_t>(channels))));
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
    for (const Layout wish : {Layout::plain, Layout::blocked}) {
      const Layout layout = possible(wish, channels);
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
       std::vector<std::pair<std::int64_t, std::int64_t>>{{32, 2}, {116, 2}, {12, 3}, {16, 1}})
    for (const Layout wish : {Layout::plain, Layout::blocked}) {
      const Layout layout = possible(wish, channels);
      const Shape shape{2, channels, 3, 4};
      Leaf leaf(shape, random_values(shape.numel(), 1));
      const Variable y = channel_shuffle(in_layout(leaf.variable(), layout), groups);
      auto x = values_of(leaf.variable()), dy = random_values(shape.numel(), 2);
      backward(weighted_sum(y, dy));
      std::vector<float> expected(x.size()), dx(x.size());
      for (std::int64_t n = 0; n < 2; ++n)
        for (std::int64_t c = 0; c < channels; ++c)
          for (std::int64_t i = 0; i < 12; ++i) {
            const std::int64_t size = channels / groups, to = c % size * groups + c / size;
            element(expected, shape, n, to, i) = element(x, shape, n, c, i);
            element(dx, shape, n, c, i) = element(dy, shape, n, to, i);
          }
      CHECK((values_of(y) == expected));
      CHECK((leaf.gradient() == dx));
    }
  CHECK_THROWS_AS(channel_shuffle(Variable(Tensor::zeros({1, 4, 2, 2})), 3), Error);
}

TEST_CASE("pad_end adds rows and columns of one value after the image") {
  for (const auto& [rows, columns] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {0, 2}, {3, 0}})
    for (const Layout layout : {Layout::plain, Layout::blocked}) {
      const Shape in{2, 16, 3, 5}, out{2, 16, 3 + rows, 5 + columns};
      Leaf leaf(in, random_values(in.numel(), 1));
      const Variable y = pad_end(in_layout(leaf.variable(), layout), rows, columns, -7.0f);
      REQUIRE(y.shape() == out);
      CHECK(y.value().layout() == layout);
      auto x = values_of(leaf.variable()), dy = random_values(out.numel(), 2);
      backward(weighted_sum(y, dy));
      std::vector<float> expected(static_cast<std::size_t>(out.numel()), -7.0f), dx(x.size());
      for (std::int64_t n = 0; n < 2; ++n)
        for (std::int64_t c = 0; c < 16; ++c)
          for (std::int64_t i = 0; i < 15; ++i) {
            const std::int64_t to = i / 5 * out[3] + i % 5;
            element(expected, out, n, c, to) = element(x, in, n, c, i);
            element(dx, in, n, c, i) = element(dy, out, n, c, to);
          }
      CHECK((values_of(y) == expected));
      CHECK((leaf.gradient() == dx));
    }
  const Variable x(Tensor::zeros({1, 2, 3, 3}));
  CHECK(pad_end(x, 0, 0).value().data() == x.value().data());
  CHECK_THROWS_AS(pad_end(x, -1, 0), Error);
}

TEST_CASE("scale_channels multiplies each channel of each image, and both inputs take their gradients") {
  for (const std::int64_t channels : {32, 24})
    for (const Layout wish : {Layout::plain, Layout::blocked}) {
      const Layout layout = possible(wish, channels);
      const Shape shape{3, channels, 5, 3};
      Leaf x(shape, random_values(shape.numel(), 1)), s({3, channels}, random_values(3 * channels, 2));
      const Variable y = scale_channels(in_layout(x.variable(), layout), s.variable());
      const auto dy = random_values(shape.numel(), 3), xs = values_of(x.variable()),
                 ss = values_of(s.variable());
      backward(weighted_sum(y, dy));
      Array ry(xs.size()), dx(xs.size()), ds(ss.size()), ds_scale(ss.size());
      for (std::size_t i = 0; i < xs.size(); ++i) {
        const std::size_t c = i / 15;
        ry[i] = static_cast<double>(xs[i]) * ss[c];
        dx[i] = static_cast<double>(dy[i]) * ss[c];
        ds[c] += static_cast<double>(dy[i]) * xs[i];
        ds_scale[c] += std::abs(static_cast<double>(dy[i]) * xs[i]);
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
      for (const Layout wish : {Layout::plain, Layout::blocked}) {
        const Layout layout = possible(wish, channels);
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
            fn(static_cast<std::size_t>(i + (j - c) * kPixels));
        };
        for (std::int64_t i = 0; i < shape.numel(); ++i) {
          const auto at = static_cast<std::size_t>(i);
          double squares = 0;
          neighbours(i, [&](std::size_t j) { squares += static_cast<double>(values[j]) * values[j]; });
          d[at] = o.k + o.alpha * squares;
          ry[at] = values[at] / std::pow(d[at], o.beta);
        }
        for (std::int64_t i = 0; i < shape.numel(); ++i) {
          const auto at = static_cast<std::size_t>(i);
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
