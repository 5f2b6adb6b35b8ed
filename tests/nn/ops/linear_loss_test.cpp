#include <tuple>

#include "tests/support/any_threads.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;
using reference::absolute;
using reference::matmul;
using reference::plus;
using reference::transpose;

TEST_CASE("linear agrees with the formula, with and without bias; in bfloat16 it sums in fp32") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const double sums = on_gpu() ? 1e-5 : 1e-6;  // what sums in fp32 are off, of the sum of absolute terms
  for (const auto& [n, in, out] : std::vector<std::array<std::int64_t, 3>>{
           {1, 1, 1}, {1, 7, 3}, {5, 64, 10}, {33, 100, 17}, {3, 784, 200}, {128, 5, 2}, {700, 5, 37}})
    for (const bool with_bias : {false, true}) {
      INFO(n << " samples, " << in << " -> " << out << (with_bias ? ", bias" : ""));
      Leaf x({n, in}, random_activations(n * in, 1)), w({out, in}, random_values(out * in, 2)),
          b({out}, random_values(out, 3));
      const auto dy = random_activations(n * out, 4);
      const Variable y =
          linear(activation(x.variable()), w.variable(), with_bias ? b.variable() : Variable());
      REQUIRE(y.shape() == Shape({n, out}));
      CHECK(y.value().dtype() == activation_type());
      const auto forward = values_of(y);
      backward(weighted_sum(y, dy));
      const Array rx = as_double(values_of(x.variable())),
                  rw = as_double(rounded_to(activation_type(), values_of(w.variable()))),
                  rb = as_double(values_of(b.variable())), rdy = as_double(dy);
      const reference::Images rows{n, out, 1};
      Array ry = matmul(n, out, in, rx, transpose(out, in, rw));
      Array scale = matmul(n, out, in, absolute(rx), transpose(out, in, absolute(rw)));
      if (with_bias) ry = add_bias(rows, ry, rb), scale = add_bias(rows, scale, absolute(rb));
      // In bfloat16 a bias is added to what is rounded already.
      check_close("y", forward, ry, scale,
                  (activation_type() == DType::bf16 && with_bias ? 2 : 1) * rounding(sums));
      check_close("dx", x.gradient(), matmul(n, in, out, rdy, rw),
                  matmul(n, in, out, absolute(rdy), absolute(rw)), rounding(sums));
      check_close("dw", w.gradient(), matmul(out, in, n, transpose(n, out, rdy), rx),
                  matmul(out, in, n, transpose(n, out, absolute(rdy)), absolute(rx)), sums);
      if (!with_bias) continue;
      check_close("db", b.gradient(), channel_sums(rows, rdy), channel_sums(rows, absolute(rdy)), sums);
    }
}

TEST_CASE("linear of one sample, or to one feature, has the same bits for any number of threads") {
  const OnDevice device(DType::f32);
  if (on_gpu()) return;
  for (const auto& [n, in, out] :
       std::vector<std::array<std::int64_t, 3>>{{1, 4096, 64}, {1, 64, 4096}, {300, 4096, 1}, {9, 4096, 1}}) {
    INFO(n << " samples, " << in << " -> " << out);
    check_any_threads([&] {
      const Leaf x({n, in}, random_activations(n * in, 1)), w({out, in}, random_values(out * in, 2)),
          b({out}, random_values(out, 3));
      const Variable y = linear(x.variable(), w.variable(), b.variable());
      backward(weighted_sum(y, random_activations(n * out, 4)));
      return std::vector{values_of(y), x.gradient(), w.gradient()};
    });
  }
}

TEST_CASE("two uses of one weight of linear, and of one input, add up") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const std::int64_t n = 4, in = 6, out = 5;
  const Leaf x({n, in}, random_activations(n * in, 1)), w({out, in}, random_values(in * out, 2)),
      b({out}, random_values(out, 5));
  const auto dy1 = random_activations(n * out, 3), dy2 = random_activations(n * out, 4);
  const Array rx = as_double(values_of(x.variable())),
              rw = as_double(rounded_to(activation_type(), values_of(w.variable()))),
              rdy = plus(as_double(dy1), as_double(dy2)),
              scale = plus(absolute(as_double(dy1)), absolute(as_double(dy2)));
  for (int step = 0; step < 2; ++step) {  // the second overwrites the first
    x.clear(), w.clear(), b.clear();
    const Variable input = activation(x.variable());
    backward_from(
        {{linear(input, w.variable(), b.variable()), dy1}, {linear(input, w.variable(), b.variable()), dy2}});
    check_close("dx", x.gradient(), matmul(n, in, out, rdy, rw), matmul(n, in, out, scale, absolute(rw)),
                2 * rounding(5e-6));
    check_close("dw", w.gradient(), matmul(out, in, n, transpose(n, out, rdy), rx),
                matmul(out, in, n, transpose(n, out, scale), absolute(rx)), 1e-5);
    const reference::Images rows{n, out, 1};
    check_close("db", b.gradient(), channel_sums(rows, rdy), channel_sums(rows, scale), 1e-5);
  }
}

TEST_CASE("linear takes batches of more sizes than it keeps prepared") {
  const Variable weight(Tensor::from(std::vector<float>(6, 1.0f), {2, 3}));
  for (std::int64_t n = 1; n < 300; ++n) {
    const Variable x(Tensor::from(std::vector<float>(std::size_t(3 * n), 1.0f), {n, 3}));
    REQUIRE(values_of(linear(x, weight, {})) == std::vector<float>(std::size_t(2 * n), 3.0f));
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

namespace {

struct Loss {
  float value;
  std::vector<float> gradient;
};
// Backward with a gradient of `scale`.
Loss cross_entropy(const std::vector<float>& z, const Shape& shape, const std::vector<std::int32_t>& labels,
                   float smoothing = 0, float scale = 1) {
  const Leaf logits(shape, z);
  const DeviceNumbers on_device(labels);
  const Variable loss = softmax_cross_entropy(activation(logits.variable()), on_device, smoothing);
  CHECK(loss.shape() == Shape({1}));
  CHECK(loss.value().dtype() == DType::f32);
  const float value = loss.value().to_vector()[0];
  backward(loss, {}, scale);
  return {value, logits.gradient()};
}

// Of labels among the `top` greatest, added to a sum.
double correct(const std::vector<float>& z, std::int64_t classes, const std::vector<std::int32_t>& labels,
               int top) {
  const Leaf logits({std::int64_t(labels.size()), classes}, z);
  const DeviceNumbers on_device(labels);
  double sum = 10;
  std::vector<float> bits(2);
  std::memcpy(bits.data(), &sum, sizeof sum);
  Tensor there = Tensor::from(bits, {2}, test_device());
  count_correct(activation(logits.variable()).value(), on_device, top, there.as<double>());
  bits = there.to_vector();
  std::memcpy(&sum, bits.data(), sizeof sum);
  return sum - 10;
}

}  // namespace

TEST_CASE("softmax_cross_entropy agrees with the formula, for large logits and smoothed labels too") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const float smoothing : {0.0f, 0.1f, 0.9f})
    for (const float size : {1.0f, 30.0f, 3000.0f})
      for (const auto& [n, classes] : std::vector<std::pair<std::int64_t, std::int64_t>>{
               {1, 1}, {1, 2}, {7, 10}, {300, 33}, {3, 1000}, {5, 2048}, {3, 10007}}) {
        INFO("logits of about " << size << ", " << n << " x " << classes << ", smoothing " << smoothing);
        auto z = random_values(n * classes, 1);
        for (float& v : z) v *= size;
        z = rounded_to(activation_type(), z);
        std::vector<std::int32_t> labels(static_cast<std::size_t>(n));
        for (std::size_t i = 0; i < labels.size(); ++i)
          labels[i] = std::int32_t((i * 37 + 1) % std::size_t(classes));
        const Loss loss = cross_entropy(z, {n, classes}, labels, smoothing, 0.5f);
        Array dz;
        const double expected =
            reference::softmax_cross_entropy(n, classes, as_double(z), labels, dz, smoothing);
        CHECK(loss.value == Approx(expected).epsilon(2e-6).margin(1e-7));
        for (double& d : dz) d *= 0.5;
        // A logit's own rounding, relative to the largest, is what the exponential sees.
        check_close("dz", loss.gradient, dz, Array(dz.size(), 1.0 / double(n)),
                    1e-6 + 1e-7 * size + rounding(0));
      }
}

TEST_CASE("softmax_cross_entropy and count_correct pass masked rows over, whatever is in them") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const float smoothing : {0.0f, 0.2f})
    for (const std::int64_t classes : {7, 3000}) {
      const auto row = std::size_t(classes);
      const auto z = random_values(2 * classes, 1);
      std::vector<float> padded(5 * row, std::numeric_limits<float>::quiet_NaN());
      std::copy_n(z.begin(), row, padded.begin() + std::ptrdiff_t(row));
      std::copy_n(z.begin() + classes, row, padded.begin() + std::ptrdiff_t(3 * row));
      const auto run = [&](const std::vector<float>& values, const std::vector<std::int32_t>& labels) {
        const auto [value, gradient] =
            cross_entropy(values, {std::int64_t(labels.size()), classes}, labels, smoothing);
        return std::tuple(value, gradient, correct(values, classes, labels, int(classes)));
      };
      const auto [loss, gradient, hits] = run(z, {4, 2});
      const auto [masked_loss, masked_gradient, masked_hits] =
          run(padded, {kNoLabel, 4, kNoLabel, 2, kNoLabel});
      CHECK(masked_loss == loss);
      CHECK((hits == 2 && masked_hits == 2));
      std::vector<float> expected(5 * row, 0.0f);
      std::copy_n(gradient.begin(), row, expected.begin() + std::ptrdiff_t(row));
      std::copy_n(gradient.begin() + classes, row, expected.begin() + std::ptrdiff_t(3 * row));
      CHECK(masked_gradient == expected);
      const auto [nothing, no_gradient, no_hits] = run(z, {kNoLabel, kNoLabel});
      CHECK((nothing == 0 && no_hits == 0));
      CHECK(no_gradient == std::vector<float>(2 * row, 0.0f));
    }
}

TEST_CASE("softmax_cross_entropy: equal logits, one class, one sure answer") {
  const auto loss = [](const std::vector<float>& z, std::int32_t label) {
    const std::vector<std::int32_t> labels{label};
    Leaf logits({1, std::int64_t(z.size())}, z);
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
  const auto check = [](const std::vector<float>& z, std::size_t at) {
    const Loss loss = cross_entropy(z, {2, std::int64_t(z.size() / 2)}, {0, 1});
    CHECK(std::isnan(loss.value));
    CHECK(std::isnan(loss.gradient[at]));
    CHECK(std::isfinite(loss.gradient.back()));
  };
  for (const float bad : {nan, infinity}) {
    const OnDevice device;
    for (const std::size_t at : {0, 5, 16, 2999}) {  // a long row
      std::vector<float> z(6000, 1.0f);
      z[at] = bad;
      check(z, at);
    }
    for (std::size_t at = 0; at < 3; ++at) {
      std::vector<float> z{1, 2, 3, 4, 5, 6};
      z[at] = bad;
      check(z, at);
    }
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

TEST_CASE("mean_squared_error agrees with the formula, and lets a NaN through") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  for (const auto& [n, d] : std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {9, 5}, {70, 61}}) {
    const auto values = random_activations(n * d, 1), target = random_values(n * d, 2);
    const Leaf y({n, d}, values), goal({n, d}, target);
    const Variable loss = mean_squared_error(activation(y.variable()), goal.variable().value());
    double expected = 0;
    Array dy(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double difference = double(values[i]) - target[i];
      expected += difference * difference / double(n * d);
      dy[i] = 2 * difference / double(n * d);
    }
    CHECK(loss.value().to_vector()[0] == Approx(expected).epsilon(1e-6));
    backward(loss);
    check_close("dy", y.gradient(), dy, rounding(1e-6));
  }
  const Leaf y({1, 2}, {1, std::numeric_limits<float>::quiet_NaN()});
  const auto loss_of = [&](const Shape& target, Device where) {
    return mean_squared_error(y.variable(), Tensor::zeros(target, Layout::plain, where))
        .value()
        .to_vector()[0];
  };
  CHECK(std::isnan(loss_of({1, 2}, test_device())));
  CHECK_THROWS_AS(loss_of({1, 3}, test_device()), Error);
  if (on_gpu()) CHECK_THROWS_AS(loss_of({1, 2}, Device{}), Error);
}

TEST_CASE("count_correct: labels among the greatest classes, of equal ones the first, NaN never") {
  const OnDevice device(GENERATE(from_range(activation_types())));
  const float nan = std::numeric_limits<float>::quiet_NaN(), low = -std::numeric_limits<float>::infinity();
  CHECK(correct({1, 3, 3, 3, 1, 3}, 3, {1, 2}, 1) == 1);
  CHECK(correct({low, low, low, low}, 2, {0, 1}, 1) == 1);
  CHECK(correct({nan, 5, 1, nan}, 2, {0, 0}, 1) == 0);
  CHECK(correct({1, 2, 2, 0, 2, 2}, 3, {2, 2}, 2) == 2);
  CHECK(correct({1, 2, 2, 0, 2, 2}, 3, {0, 0}, 2) == 0);

  const std::int64_t n = 200, classes = 23;
  std::vector<float> z;  // of a row no two are equal
  for (std::int64_t i = 0; i < n * classes; ++i) z.push_back(float((i * 37 + 11) % 251) / 64 - 2);
  std::vector<std::int32_t> labels;
  for (std::int32_t i = 0; i < n; ++i) labels.push_back(i % classes);
  for (const int top : {1, 5, 22, 23}) {
    double expected = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      std::vector<float> row(z.begin() + i * classes, z.begin() + (i + 1) * classes);
      const float at_label = row[std::size_t(labels[std::size_t(i)])];
      std::sort(row.begin(), row.end(), std::greater<>());
      expected += at_label >= row[std::size_t(top - 1)];
    }
    CHECK(correct(z, classes, labels, top) == expected);
  }
  if (on_gpu())  // where the host does not read labels
    CHECK(correct({1, 2, 3, 1, 2, 3}, 3, {3, kNoLabel}, 3) == 0);
  else
    CHECK_THROWS_AS(correct({1, 2}, 2, {2}, 1), Error);
}
