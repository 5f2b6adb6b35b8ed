// Pooling on a GPU against the formula in float64.
#include "nn/ops/ops.h"

#include <cmath>
#include <limits>

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using namespace testing;
using testing::backward_from;
using testing::CaughtInput;
using testing::gpu_tensor;
using testing::rounded_to;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void check_pool(const PoolGeometry& g, const Shape& shape, DType type) {
  INFO((g.kind == PoolKind::max ? "max" : "average")
       << " window " << g.window << ", stride " << g.stride << ", padding " << g.padding << " on "
       << shape.str() << (type == DType::bf16 ? ", bf16" : ""));
  // Numbers of an open order: of equal ones cuDNN does not say which takes the gradient.
  auto values = random_values(shape.numel(), 1);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((i * 37 + 11) % 251) / 64.0f - 2.0f;
  const CaughtInput x(gpu_tensor(values, shape, Layout::nhwc, type));
  const Variable y = pool(x.variable(), g);
  REQUIRE(y.shape() == Shape({shape[0], shape[1], g.output_size(shape[2]), g.output_size(shape[3])}));
  REQUIRE(y.value().layout() == Layout::nhwc);
  const auto dy = rounded_to(type, random_values(y.value().numel(), 2));
  backward_from({{y, dy}});

  const bool max = g.kind == PoolKind::max;
  const reference::Pool r{shape[0] * shape[1], shape[2], shape[3], g.window, g.stride, g.padding, max};
  Array ry, rdx;
  r.run(as_double(rounded_to(type, values)), as_double(dy), ry, rdx);
  // bfloat16: 2^-8 of sums of up to nine numbers of about one.
  const double rounding = type == DType::bf16 ? 1.0 / 256 : 1e-6;
  check_close("y", testing::values_of(y.value()), ry, Array(ry.size(), max ? 0 : 4.0), rounding);
  check_close("dx", x.gradient(), rdx, Array(rdx.size(), max && g.window <= g.stride ? 0 : 9.0), rounding);
}

TEST_CASE("pooling on a GPU agrees with the formula: windows, strides, padding, odd sizes") {
  for (const DType type : {DType::f32, DType::bf16}) {
    const OnGpu gpu(type == DType::bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
    for (const PoolKind kind : {PoolKind::max, PoolKind::average}) {
      check_pool({kind, 2, 2, 0}, {2, 3, 8, 6}, type);
      check_pool({kind, 2, 2, 0}, {1, 1, 7, 9}, type);  // the last row and column are left out
      check_pool({kind, 3, 2, 1}, {2, 8, 9, 8}, type);
      check_pool({kind, 3, 1, 1}, {1, 5, 5, 7}, type);
      check_pool({kind, 2, 3, 0}, {1, 4, 8, 10}, type);  // gaps between the windows
      check_pool({kind, 2, 2, 0}, {1, 4, 2, 2}, type);
    }
  }
}

TEST_CASE("max pooling on a GPU: padding never wins, a NaN comes through, equal values share one gradient") {
  const OnGpu gpu;
  const Shape shape{1, 4, 4, 4};
  std::vector<float> low(64, -100.0f);
  const CaughtInput x(gpu_tensor(low, shape, Layout::nhwc, DType::f32));
  const Variable y = pool(x.variable(), {PoolKind::max, 2, 2, 0});
  CHECK(testing::values_of(y.value()) == std::vector<float>(16, -100.0f));
  backward_from({{y, std::vector<float>(16, 1.0f)}});
  const auto dx = x.gradient();
  double sum = 0;
  for (const float g : dx) sum += g;
  CHECK(sum == 16);

  low[0] = kNan;  // channel 0, first window
  const Variable bad =
      pool(Variable(gpu_tensor(low, shape, Layout::nhwc, DType::f32)), {PoolKind::max, 3, 2, 1});
  const auto values = testing::values_of(bad.value());
  for (std::size_t i = 0; i < values.size(); ++i) CHECK(std::isnan(values[i]) == (i == 0));
}

TEST_CASE("pooling on a GPU rejects a window larger than the image") {
  const OnGpu gpu;
  const Variable x(gpu_tensor(std::vector<float>(16), {1, 4, 2, 2}, Layout::nhwc, DType::f32));
  CHECK_THROWS_AS(pool(x, {PoolKind::max, 3, 1, 0}), Error);
}

TEST_CASE("global_average_pool on a GPU has the CPU's bits; in bfloat16 it is the formula's") {
  for (const DType type : {DType::f32, DType::bf16}) {
    const OnGpu gpu(type == DType::bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
    for (const Shape& shape :
         {Shape{1, 1, 1, 1}, Shape{3, 5, 4, 3}, Shape{2, 300, 7, 7}, Shape{2, 1, 33, 9}}) {
      INFO(shape.str());
      const auto values = rounded_to(type, random_values(shape.numel(), 1, 0.5f));
      const auto dy = rounded_to(type, random_values(shape[0] * shape[1], 2));
      const CaughtInput x(gpu_tensor(values, shape, Layout::nhwc, type));
      const Variable y = global_average_pool(x.variable());
      REQUIRE(y.shape() == Shape({shape[0], shape[1]}));
      REQUIRE(y.value().layout() == Layout::plain);
      backward_from({{y, dy}});
      Leaf on_cpu(shape, values);
      const Variable expected = global_average_pool(on_cpu.variable());
      backward(weighted_sum(expected, dy));
      CHECK(testing::values_of(y.value()) == rounded_to(type, expected.value().to_vector()));
      CHECK(x.gradient() == rounded_to(type, on_cpu.gradient()));
    }
  }
}

}  // namespace
}  // namespace topknot
