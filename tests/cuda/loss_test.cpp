// The losses on a GPU against the formulas in float64.
#include "nn/ops/ops.h"

#include <cmath>
#include <limits>

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using namespace testing;
using testing::CaughtInput;
using testing::DeviceVector;
using testing::gpu_tensor;
using testing::rounded_to;

std::vector<std::int32_t> some_labels(std::int64_t n, std::int64_t classes) {
  std::vector<std::int32_t> labels(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < labels.size(); ++i)
    labels[i] = static_cast<std::int32_t>((i * 37 + 1) % static_cast<std::size_t>(classes));
  return labels;
}

// An input that catches its gradient and a backward pass from the loss with a gradient of `scale`.
struct Loss {
  float value;
  std::vector<float> gradient;
};
Loss cross_entropy(const std::vector<float>& z, const Shape& shape, const std::vector<std::int32_t>& labels,
                   DType type = DType::f32, float scale = 1, float smoothing = 0) {
  const DeviceVector<std::int32_t> on_gpu(labels);
  const CaughtInput logits(gpu_tensor(z, shape, Layout::plain, type));
  const Variable loss = softmax_cross_entropy(logits.variable(), {on_gpu.data(), labels.size()}, smoothing);
  CHECK(loss.shape() == Shape({1}));
  CHECK(loss.value().dtype() == DType::f32);
  const float value = loss.value().to_vector()[0];
  backward(loss, {}, scale);
  return {value, logits.gradient()};
}

TEST_CASE(
    "softmax_cross_entropy on a GPU agrees with the formula, for large logits and smoothed labels too") {
  const OnGpu gpu;
  for (const float smoothing : {0.0f, 0.1f})
    for (const DType type : {DType::f32, DType::bf16})
      for (const float size : {1.0f, 30.0f, 3000.0f})
        for (const auto& [n, classes] : std::vector<std::pair<std::int64_t, std::int64_t>>{
                 {1, 1}, {1, 2}, {7, 10}, {300, 33}, {3, 1000}}) {
          INFO("logits of about " << size << ", " << n << " x " << classes
                                  << (type == DType::bf16 ? ", bf16" : "") << ", smoothing " << smoothing);
          auto z = random_values(n * classes, 1);
          for (float& v : z) v *= size;
          z = rounded_to(type, z);
          const auto labels = some_labels(n, classes);
          const Loss loss = cross_entropy(z, {n, classes}, labels, type, 0.5f, smoothing);
          Array dz;
          const double expected =
              reference::softmax_cross_entropy(n, classes, as_double(z), labels, dz, smoothing);
          CHECK(loss.value == Approx(expected).epsilon(2e-6).margin(1e-7));
          for (double& d : dz) d *= 0.5;
          const double rounding = type == DType::bf16 ? 1.0 / 256 : 0;
          check_close("dz", loss.gradient, dz, Array(dz.size(), 1.0 / static_cast<double>(n)),
                      1e-6 + 1e-7 * size + rounding);
        }
}

TEST_CASE("softmax_cross_entropy on a GPU lets NaN and infinity through, in their own rows") {
  const OnGpu gpu;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    for (const std::size_t at : {0, 1, 39}) {
      auto z = random_values(80, 1);
      z[at] = bad;
      const Loss loss = cross_entropy(z, {2, 40}, {0, 1});
      CHECK(std::isnan(loss.value));
      CHECK(std::isnan(loss.gradient[at]));
      CHECK(std::isfinite(loss.gradient[79]));
    }
}

TEST_CASE("losses on a GPU pass masked rows over, whatever is in them") {
  const OnGpu gpu;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const DType type : {DType::f32, DType::bf16})
    for (const float smoothing : {0.0f, 0.2f}) {
      const Loss plain = cross_entropy({1, 2, 3, 6, 5, 4}, {2, 3}, {2, 1}, type, 1, smoothing);
      const Loss masked = cross_entropy({nan, nan, nan, 1, 2, 3, nan, 0, 0, 6, 5, 4}, {4, 3},
                                        {kNoLabel, 2, kNoLabel, 1}, type, 1, smoothing);
      CHECK(masked.value == plain.value);
      for (std::size_t i = 0; i < 12; ++i)
        CHECK(masked.gradient[i] == (i / 3 % 2 == 0 ? 0.0f : plain.gradient[i / 6 * 3 + i % 3]));
      const Loss nothing = cross_entropy({nan, 2}, {1, 2}, {kNoLabel}, type, 1, smoothing);
      CHECK((nothing.value == 0 && nothing.gradient == std::vector<float>{0, 0}));
    }
}

TEST_CASE("a label that is no class makes the loss and its row's gradient NaN, and reads nothing outside") {
  const OnGpu gpu;
  for (const std::int32_t label : {-2, 3, 1 << 30}) {
    const Loss loss = cross_entropy({1, 2, 3, 4, 5, 6}, {2, 3}, {label, 1});
    CHECK(std::isnan(loss.value));
    for (std::size_t i = 0; i < 6; ++i) CHECK(std::isnan(loss.gradient[i]) == (i < 3));
  }
}

TEST_CASE("mean_squared_error on a GPU agrees with the formula") {
  const OnGpu gpu;
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [n, d] : std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {9, 5}, {70, 61}}) {
      INFO(n << " x " << d << (type == DType::bf16 ? ", bf16" : ""));
      const auto values = rounded_to(type, random_values(n * d, 1)), target = random_values(n * d, 2);
      const CaughtInput y(gpu_tensor(values, {n, d}, Layout::plain, type));
      const Tensor goal = gpu_tensor(target, {n, d}, Layout::plain, DType::f32);
      const Variable loss = mean_squared_error(y.variable(), goal);
      double expected = 0;
      Array dy(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double difference = static_cast<double>(values[i]) - target[i];
        expected += difference * difference / static_cast<double>(n * d);
        dy[i] = 2 * difference / static_cast<double>(n * d);
      }
      CHECK(loss.value().to_vector()[0] == Approx(expected).epsilon(1e-6));
      backward(loss);
      check_close("dy", y.gradient(), dy, type == DType::bf16 ? 1.0 / 256 : 1e-6);
    }
  const Variable y(gpu_tensor({1, 2}, {1, 2}, Layout::plain, DType::f32));
  CHECK_THROWS_AS(mean_squared_error(y, Tensor::zeros({1, 3}, Layout::plain, gpu.device())), Error);
  CHECK_THROWS_AS(mean_squared_error(y, Tensor::zeros({1, 2})), Error);
}

TEST_CASE("mean_squared_error on a GPU lets a NaN through") {
  const OnGpu gpu;
  const Tensor y =
      gpu_tensor({1, std::numeric_limits<float>::quiet_NaN()}, {1, 2}, Layout::plain, DType::f32);
  const Variable loss = mean_squared_error(Variable(y), Tensor::zeros({1, 2}, Layout::plain, gpu.device()));
  CHECK(std::isnan(loss.value().to_vector()[0]));
}

TEST_CASE("count_correct adds the rows whose label is among the first by size") {
  const OnGpu gpu;
  const DeviceVector<double> sums(std::vector<double>{10});
  const auto count = [&](const std::vector<float>& z, const Shape& shape,
                         const std::vector<std::int32_t>& labels, DType type, int top = 1) {
    const DeviceVector<std::int32_t> on_gpu(labels);
    count_correct(gpu_tensor(z, shape, Layout::plain, type), {on_gpu.data(), labels.size()}, top,
                  sums.data());
    return sums.host()[0];
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), low = -std::numeric_limits<float>::infinity();
  CHECK(count({1, 3, 3, 3, 1, 3}, {2, 3}, {1, 2}, DType::f32) == 11);  // of equal ones the first
  CHECK(count({low, low, low, low}, {2, 2}, {0, 1}, DType::bf16) == 12);
  CHECK(count({nan, 5, 1, nan}, {2, 2}, {0, 0}, DType::f32) == 12);  // never right
  CHECK(count({1, 2, 2, 0, 2, 2}, {2, 3}, {2, 2}, DType::f32, 2) == 14);
  CHECK(count({1, 2, 3, 1, 2, 3}, {2, 3}, {3, kNoLabel}, DType::f32, 3) == 14);  // no class

  const std::int64_t n = 301, classes = 70;
  const auto z = random_values(n * classes, 1);
  const auto labels = some_labels(n, classes);
  double expected = 0, five = 0;
  count_correct(Tensor::from(z, {n, classes}), labels, 1, &expected);
  count_correct(Tensor::from(z, {n, classes}), labels, 5, &five);
  REQUIRE((0 < expected && expected < five));
  CHECK(count(z, {n, classes}, labels, DType::f32) == 14 + expected);
  CHECK(count(z, {n, classes}, labels, DType::f32, 5) == 14 + expected + five);
}

}  // namespace
}  // namespace topknot
