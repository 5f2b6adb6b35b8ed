#include <algorithm>
#include <functional>
#include <limits>
#include <tuple>

#include "nn/ops/ops.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;
using reference::matmul;
using reference::transpose;

TEST_CASE("linear agrees with the formula, with and without bias") {
  for (const auto& [n, in, out] : std::vector<std::array<std::int64_t, 3>>{
           {1, 1, 1}, {1, 7, 3}, {5, 64, 10}, {33, 100, 17}, {3, 784, 200}, {128, 5, 2}})
    for (const bool with_bias : {false, true}) {
      INFO(n << " samples, " << in << " -> " << out << (with_bias ? ", bias" : ""));
      Leaf x({n, in}, random_values(n * in, 1)), w({out, in}, random_values(out * in, 2)),
          b({out}, random_values(out, 3));
      const auto dy = random_values(n * out, 4);
      const Variable y = linear(x.variable(), w.variable(), with_bias ? b.variable() : Variable());
      REQUIRE(y.shape() == Shape({n, out}));
      const auto forward = values_of(y);
      backward(weighted_sum(y, dy));
      const Array rx = as_double(values_of(x.variable())), rw = as_double(values_of(w.variable())),
                  rb = as_double(values_of(b.variable())), rdy = as_double(dy);
      const reference::Images rows{n, out, 1};
      Array ry = matmul(n, out, in, rx, transpose(out, in, rw));
      Array scale = matmul(n, out, in, absolute(rx), transpose(out, in, absolute(rw)));
      if (with_bias) ry = add_bias(rows, ry, rb), scale = add_bias(rows, scale, absolute(rb));
      check_close("y", forward, ry, scale, 1e-6);
      check_close("dx", x.gradient(), matmul(n, in, out, rdy, rw),
                  matmul(n, in, out, absolute(rdy), absolute(rw)), 1e-6);
      check_close("dw", w.gradient(), matmul(out, in, n, transpose(n, out, rdy), rx),
                  matmul(out, in, n, transpose(n, out, absolute(rdy)), absolute(rx)), 1e-6);
      if (!with_bias) continue;
      check_close("db", b.gradient(), channel_sums(rows, rdy), channel_sums(rows, absolute(rdy)), 1e-6);
    }
}

TEST_CASE("linear takes batches of more sizes than it keeps prepared") {
  const Variable weight(Tensor::from(std::vector<float>(6, 1.0f), {2, 3}));
  for (std::int64_t n = 1; n < 300; ++n) {
    const Variable x(Tensor::from(std::vector<float>(static_cast<std::size_t>(3 * n), 1.0f), {n, 3}));
    REQUIRE(values_of(linear(x, weight, {})) == std::vector<float>(static_cast<std::size_t>(2 * n), 3.0f));
  }
}

TEST_CASE("linear: a shared weight adds up its gradients; constants take none") {
  Leaf x({2, 3}, {1, 2, 3, 4, 5, 6}), w({3, 3}, {1, 0, 0, 0, 1, 0, 0, 0, 1});
  backward(
      weighted_sum(linear(linear(x.variable(), w.variable(), {}), w.variable(), {}), {1, 0, 0, 0, 1, 0}));
  // y = x W^T W^T with W = I: dW = dy^T (x W^T) + (dy W)^T x = 2 dy^T x
  CHECK((w.gradient() == std::vector<float>{2, 4, 6, 8, 10, 12, 0, 0, 0}));
  CHECK((x.gradient() == std::vector<float>{1, 0, 0, 0, 1, 0}));

  Leaf input({1, 3}, {1, 2, 3});
  backward(weighted_sum(linear(input.variable(), Variable(Tensor::from({1, 1, 1}, {1, 3})), {}), {2}));
  CHECK((input.gradient() == std::vector<float>{2, 2, 2}));
  CHECK_THROWS_AS(linear(input.variable(), Variable(Tensor::zeros({2, 4})), {}), Error);
  CHECK_THROWS_AS(linear(input.variable(), Variable(Tensor::zeros({2, 3})), Variable(Tensor::zeros({3}))),
                  Error);
}

TEST_CASE("softmax_cross_entropy agrees with the formula, for large logits and smoothed labels too") {
  for (const float smoothing : {0.0f, 0.1f, 0.9f})
    for (const float size : {1.0f, 30.0f, 3000.0f})
      for (const auto& [n, classes] : std::vector<std::pair<std::int64_t, std::int64_t>>{
               {1, 2}, {7, 10}, {3, 1000}, {5, 2048}, {3, 10007}}) {
        INFO("logits of about " << size << ", " << n << " x " << classes << ", smoothing " << smoothing);
        auto z = random_values(n * classes, 1);
        for (float& v : z) v *= size;
        std::vector<std::int32_t> labels(static_cast<std::size_t>(n));
        for (std::size_t i = 0; i < labels.size(); ++i)
          labels[i] = static_cast<std::int32_t>((i * 37 + 1) % static_cast<std::size_t>(classes));
        Leaf logits({n, classes}, z);
        const Variable loss = softmax_cross_entropy(logits.variable(), labels, smoothing);
        CHECK(loss.shape() == Shape({1}));
        const float value = loss.value().data()[0];
        backward(loss);
        Array dz;
        const double expected =
            reference::softmax_cross_entropy(n, classes, as_double(z), labels, dz, smoothing);
        CHECK(value == Approx(expected).epsilon(2e-6));
        // A logit's own rounding, relative to the largest, is what the exponential sees.
        check_close("dz", logits.gradient(), dz, Array(dz.size(), 1.0 / static_cast<double>(n)),
                    1e-6 + 1e-7 * size);
      }
}

TEST_CASE("softmax_cross_entropy and count_correct pass masked rows over, whatever is in them") {
  for (const float smoothing : {0.0f, 0.2f})
    for (const std::int64_t classes : {7, 3000}) {
      const auto row = static_cast<std::size_t>(classes);
      const auto z = random_values(2 * classes, 1);
      std::vector<float> padded(5 * row, std::numeric_limits<float>::quiet_NaN());
      std::copy_n(z.begin(), row, padded.begin() + static_cast<std::ptrdiff_t>(row));
      std::copy_n(z.begin() + classes, row, padded.begin() + static_cast<std::ptrdiff_t>(3 * row));
      const auto run = [&](const std::vector<float>& values, const std::vector<std::int32_t>& labels) {
        Leaf logits({static_cast<std::int64_t>(labels.size()), classes}, values);
        const Variable loss = softmax_cross_entropy(logits.variable(), labels, smoothing);
        backward(loss);
        double hits = 0;
        count_correct(logits.variable().value(), labels, static_cast<int>(classes), &hits);
        return std::tuple(loss.value().data()[0], logits.gradient(), hits);
      };
      const auto [loss, gradient, hits] = run(z, {4, 2});
      const auto [masked_loss, masked_gradient, masked_hits] =
          run(padded, {kNoLabel, 4, kNoLabel, 2, kNoLabel});
      CHECK(masked_loss == loss);
      CHECK((hits == 2 && masked_hits == 2));
      std::vector<float> expected(5 * row, 0.0f);
      std::copy_n(gradient.begin(), row, expected.begin() + static_cast<std::ptrdiff_t>(row));
      std::copy_n(gradient.begin() + classes, row, expected.begin() + static_cast<std::ptrdiff_t>(3 * row));
      CHECK(masked_gradient == expected);
      const auto [nothing, no_gradient, no_hits] = run(z, {kNoLabel, kNoLabel});
      CHECK((nothing == 0 && no_hits == 0));
      CHECK(no_gradient == std::vector<float>(2 * row, 0.0f));
    }
}

TEST_CASE("softmax_cross_entropy: equal logits, one class, one sure answer") {
  const auto loss = [](const std::vector<float>& z, std::int32_t label) {
    const std::vector<std::int32_t> labels{label};
    Leaf logits({1, static_cast<std::int64_t>(z.size())}, z);
    return softmax_cross_entropy(logits.variable(), labels).value().data()[0];
  };
  CHECK(loss({5, 5, 5, 5}, 2) == Approx(std::log(4.0)));
  CHECK(loss({-7}, 0) == 0.0f);
  CHECK(loss({1e4f, -1e4f}, 0) == 0.0f);
  CHECK(loss({1e4f, -1e4f}, 1) == Approx(2e4));
}

TEST_CASE("softmax_cross_entropy lets NaN and infinity through, and rejects labels that are no class") {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  const std::vector<std::int32_t> labels{0, 1};
  for (const float bad : {nan, infinity})
    for (const std::size_t at : {0, 5, 16, 2999}) {  // a long row
      std::vector<float> z(6000, 1.0f);
      z[at] = bad;
      Leaf logits({2, 3000}, z);
      const Variable loss = softmax_cross_entropy(logits.variable(), labels);
      CHECK(std::isnan(loss.value().data()[0]));
      backward(loss);
      CHECK(std::isnan(logits.gradient()[at]));
      CHECK(std::isfinite(logits.gradient()[3000]));
    }
  for (const float bad : {nan, infinity})
    for (std::size_t at = 0; at < 3; ++at) {
      std::vector<float> z{1, 2, 3, 4, 5, 6};
      z[at] = bad;
      Leaf logits({2, 3}, z);
      const Variable loss = softmax_cross_entropy(logits.variable(), labels);
      CHECK(std::isnan(loss.value().data()[0]));
      backward(loss);
      CHECK(std::isnan(logits.gradient()[at]));
      CHECK(std::isfinite(logits.gradient()[5]));
    }
  Leaf logits({2, 3}, {1, 2, 3, 4, 5, 6});
  const auto run = [&](const std::vector<std::int32_t>& l) { softmax_cross_entropy(logits.variable(), l); };
  CHECK_THROWS_AS(run({0, 3}), Error);
  CHECK_THROWS_AS(run({-2, 0}), Error);
  CHECK_THROWS_AS(run({0}), Error);
  Leaf wide({1, 5000}, std::vector<float>(5000));
  const std::vector<std::int32_t> beyond{5000};
  CHECK_THROWS_AS(softmax_cross_entropy(wide.variable(), beyond), Error);
}

TEST_CASE("mean_squared_error agrees with the formula") {
  const std::int64_t n = 9, d = 5;
  const auto values = random_values(n * d, 1), target = random_values(n * d, 2);
  Leaf y({n, d}, values);
  const Variable loss = mean_squared_error(y.variable(), Tensor::from(target, {n, d}));
  double expected = 0;
  Array dy(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double difference = static_cast<double>(values[i]) - target[i];
    expected += difference * difference / 45;
    dy[i] = 2 * difference / 45;
  }
  CHECK(loss.value().data()[0] == Approx(expected).epsilon(1e-6));
  backward(loss);
  check_close("dy", y.gradient(), dy, Array(dy.size(), 0.1), 1e-6);
  CHECK_THROWS_AS(mean_squared_error(y.variable(), Tensor::zeros({n, d + 1})), Error);
}

TEST_CASE("count_correct: labels among the greatest classes, of equal ones the first, NaN never") {
  const auto count = [](const std::vector<float>& z, std::int64_t classes,
                        const std::vector<std::int32_t>& labels, int top) {
    double sum = 0;
    count_correct(Tensor::from(z, {static_cast<std::int64_t>(labels.size()), classes}), labels, top, &sum);
    return sum;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), low = -std::numeric_limits<float>::infinity();
  CHECK(count({1, 3, 3, 3, 1, 3}, 3, {1, 2}, 1) == 1);
  CHECK(count({low, low, low, low}, 2, {0, 1}, 1) == 1);
  CHECK(count({nan, 5, 1, nan}, 2, {0, 0}, 1) == 0);
  CHECK(count({1, 2, 2, 0, 2, 2}, 3, {2, 2}, 2) == 2);
  CHECK(count({1, 2, 2, 0, 2, 2}, 3, {0, 0}, 2) == 0);

  const std::int64_t n = 200, classes = 23;
  const auto z = random_values(n * classes, 1);
  std::vector<std::int32_t> labels;
  for (std::int32_t i = 0; i < n; ++i) labels.push_back(i % classes);
  for (const int top : {1, 5, 22, 23}) {
    double expected = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      std::vector<float> row(z.begin() + i * classes, z.begin() + (i + 1) * classes);
      const float at_label = row[static_cast<std::size_t>(labels[static_cast<std::size_t>(i)])];
      std::sort(row.begin(), row.end(), std::greater<>());
      expected += at_label >= row[static_cast<std::size_t>(top - 1)];
    }
    CHECK(count(z, classes, labels, top) == expected);
  }
  CHECK_THROWS_AS(count({1, 2}, 2, {2}, 1), Error);
}
