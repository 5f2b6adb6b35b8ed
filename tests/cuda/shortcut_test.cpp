// The shortcut, flatten, and activations in and out of the GPU's layouts and types.
#include "nn/ops/ops.h"

#include "tests/cuda/device_vector.h"
#include "tests/cuda/probe.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace testing;

void check_same(const Op& op, const Shape& shape, std::int64_t outputs, bool bf16) {
  INFO(shape.str() << (bf16 ? ", bf16" : ", f32"));
  const OnGpu gpu(bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
  const std::vector<Input> x{{shape, rounded_to(DType::bf16, random_values(shape.numel(), 1))}};
  const auto dy = rounded_to(DType::bf16, random_values(outputs, 2));
  const Probe expected = probe(op, x, dy, false), actual = probe(op, x, dy, true);
  CHECK(actual.shape == expected.shape);
  CHECK(same_bits(actual.value, expected.value));
  CHECK(same_bits(actual.gradients[0], expected.gradients[0]));
}

TEST_CASE("subsample_and_pad on a GPU is the CPU's") {
  // Channels by whole parameters and not; odd and even sides.
  const std::vector<std::pair<Shape, std::int64_t>> cases{
      {{2, 16, 8, 8}, 32}, {{3, 32, 7, 5}, 64}, {{1, 16, 1, 1}, 16}, {{2, 5, 4, 3}, 9},
      {{2, 8, 3, 4}, 16},  {{2, 3, 4, 4}, 8},   {{1, 24, 5, 2}, 40}};
  for (const auto& [shape, channels] : cases)
    for (const bool bf16 : {false, true})
      check_same([channels = channels](auto x) { return subsample_and_pad(x[0], channels); }, shape,
                 shape[0] * channels * ((shape[2] + 1) / 2) * ((shape[3] + 1) / 2), bf16);
}

TEST_CASE("flatten on a GPU gives C, H, W order, and the gradient goes back") {
  for (const Shape& shape : {Shape{3, 40, 3, 5}, Shape{2, 3, 9, 8}, Shape{2, 64, 1, 1}, Shape{3, 7}})
    for (const bool bf16 : {false, true})
      check_same([](auto x) { return flatten(x[0]); }, shape, shape.numel(), bf16);
}

TEST_CASE("images become activations and come back: bfloat16 rounds to nearest") {
  for (const bool bf16 : {false, true}) {
    const OnGpu gpu(bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
    const Shape shape{2, 3, 5, 34};
    const auto values = random_values(shape.numel(), 3);
    for (const Device from : {Device{}, gpu.device()}) {
      const Tensor x = cuda::to_activation(Tensor::from(values, shape, from));
      CHECK(x.layout() == Layout::nhwc);
      CHECK(x.dtype() == (bf16 ? DType::bf16 : DType::f32));
      const auto stored = x.to_vector();
      std::vector<float> expected;
      for (std::int64_t n = 0; n < 2; ++n)
        for (std::int64_t i = 0; i < 5 * 34; ++i)
          for (std::int64_t c = 0; c < 3; ++c)
            expected.push_back(values[static_cast<std::size_t>((n * 3 + c) * 5 * 34 + i)]);
      CHECK(same_bits(stored, bf16 ? rounded_to(DType::bf16, expected) : expected));
      CHECK(same_bits(cuda::to_plain(x).to_vector(), bf16 ? rounded_to(DType::bf16, values) : values));
    }
    const Tensor features = cuda::to_activation(Tensor::from(random_values(21, 4), {3, 7}));
    CHECK(features.layout() == Layout::plain);
    CHECK(features.dtype() == (bf16 ? DType::bf16 : DType::f32));
  }
}

}  // namespace
}  // namespace topknot
