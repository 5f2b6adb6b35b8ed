// frames_to_rows, rows_to_images and mask_frames on a GPU against the CPU's, element by element.

#include "nn/ops/kernels.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using namespace testing;
using testing::CaughtInput;
using testing::gpu_tensor;
using testing::rounded_to;

TEST_CASE("frames_to_rows and rows_to_images on a GPU move every element as on the CPU") {
  const OnGpu gpu;
  for (const DType type : {DType::f32, DType::bf16})
    for (const std::int64_t channels : {1, 3, 32}) {
      const Shape shape{2, channels, 5, 7};
      const auto values = rounded_to(type, random_values(shape.numel(), 1)),
                 dy = rounded_to(type, random_values(shape.numel(), 2));
      Leaf expected(shape, values);
      const Variable there = flatten(rows_to_images(frames_to_rows(expected.variable())));
      const CaughtInput x(gpu_tensor(values, shape, Layout::nhwc, type));
      const Variable rows = flatten(rows_to_images(frames_to_rows(x.variable())));
      CHECK(testing::values_of(rows.value()) == testing::values_of(there));
      backward(weighted_sum(there, dy));
      testing::backward_from({{rows, dy}});
      CHECK(x.gradient() == expected.gradient());
    }
}

TEST_CASE("mask_frames on a GPU masks as on the CPU, pictures and rows") {
  const OnGpu gpu;
  const std::vector<std::int32_t> frames{7, 2, 0};
  const auto there = cuda::on_device(frames);
  const std::span<const std::int32_t> on_gpu{there.data(), there.size()};
  for (const DType type : {DType::f32, DType::bf16})
    for (const Shape& shape : {Shape{3, 5, 4, 7}, Shape{7 * 3, 10}}) {
      const auto values = rounded_to(type, random_values(shape.numel(), 1)),
                 dy = rounded_to(type, random_values(shape.numel(), 2));
      Leaf expected(shape, values);
      const Variable on_cpu = mask_frames(expected.variable(), frames);
      const bool rows = shape.rank() == 2;
      const CaughtInput x(gpu_tensor(values, shape, rows ? Layout::plain : Layout::nhwc, type));
      const Variable y = mask_frames(x.variable(), on_gpu);
      CHECK(testing::values_of(y.value()) == testing::values_of(on_cpu));
      backward(weighted_sum(on_cpu, dy));
      testing::backward_from({{y, dy}});
      CHECK(x.gradient() == expected.gradient());
    }
}

}  // namespace
}  // namespace topknot
