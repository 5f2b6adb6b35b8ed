// frames_to_rows and rows_to_images on a GPU against the CPU's, element by element.
#include "nn/ops/frames.h"

#include "nn/ops/layout.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using namespace testing;
using test::CaughtInput;
using test::gpu_tensor;
using test::rounded_to;

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
      CHECK(test::values_of(rows.value()) == testing::values_of(there));
      backward(weighted_sum(there, dy));
      test::backward_from({{rows, dy}});
      CHECK(x.gradient() == expected.gradient());
    }
}

}  // namespace
}  // namespace topknot
