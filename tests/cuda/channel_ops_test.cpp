// concat, slice_channels, channel_shuffle, pad_end, scale_channels and local_response_norm on a GPU are the CPU's.
#include <cmath>

#include "nn/ops/ops.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/probe.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace testing;

// `rounding`: of sums, relative to one; 0: the same bits.
void check_same(const Op& op, const std::vector<Shape>& shapes, const Shape& output, double rounding = 0) {
  for (const bool bf16 : {false, true}) {
    INFO(output.str() << (bf16 ? ", bf16" : ", f32"));
    const OnGpu gpu(bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
    std::vector<Input> x;
    for (const Shape& shape : shapes)
      x.push_back({shape, rounded_to(DType::bf16,
                                     random_values(shape.numel(), static_cast<std::uint32_t>(x.size())))});
    const auto dy = rounded_to(DType::bf16, random_values(output.numel(), 9));
    const Probe expected = probe(op, x, dy, false), actual = probe(op, x, dy, true);
    REQUIRE(actual.shape == output);
    const auto same = [&](const std::vector<float>& a, const std::vector<float>& b) {
      if (rounding == 0) {
        CHECK(same_bits(a, bf16 ? rounded_to(DType::bf16, b) : b));
        return;
      }
      std::vector<double> scale;
      for (const float v : b) scale.push_back(std::abs(v) + (bf16 ? 0.1 : 1.0));
      testing::check_close("values", a, {b.begin(), b.end()}, scale, bf16 ? 1.0 / 256 : rounding);
    };
    same(actual.value, expected.value);
    for (std::size_t i = 0; i < x.size(); ++i) same(actual.gradients[i], expected.gradients[i]);
  }
}

TEST_CASE("concat, slice_channels and channel_shuffle on a GPU are the CPU's") {
  check_same(
      [](auto x) {
        return concat({x[0], x[1], x[2]});
      },
      {{2, 16, 3, 5}, {2, 3, 3, 5}, {2, 5, 3, 5}}, {2, 24, 3, 5});
  check_same([](auto x) { return slice_channels(x[0], 2, 5); }, {{3, 9, 4, 3}}, {3, 5, 4, 3});
  check_same(
      [](auto x) {
        return concat({slice_channels(x[0], 3, 2), slice_channels(x[0], 0, 4)});
      },
      {{3, 5, 1, 3}}, {3, 6, 1, 3});  // two contributions to one gradient
  check_same([](auto x) { return channel_shuffle(x[0], 2); }, {{2, 58, 3, 4}}, {2, 58, 3, 4});
  check_same([](auto x) { return channel_shuffle(x[0], 3); }, {{2, 12, 1, 4}}, {2, 12, 1, 4});
}

TEST_CASE("pad_end on a GPU is the CPU's") {
  check_same([](auto x) { return pad_end(x[0], 1, 1); }, {{2, 5, 4, 6}}, {2, 5, 5, 7});
  check_same([](auto x) { return pad_end(x[0], 0, 2, -3.0f); }, {{1, 16, 3, 3}}, {1, 16, 3, 5});
}

TEST_CASE("scale_channels on a GPU is the CPU's") {
  for (const std::int64_t channels : {5, 32})
    check_same([](auto x) { return scale_channels(x[0], x[1]); }, {{3, channels, 4, 5}, {3, channels}},
               {3, channels, 4, 5});
}

TEST_CASE("local_response_norm on a GPU agrees with the CPU's") {
  for (const std::int64_t channels : {3, 40})
    for (const LrnOptions& o : {LrnOptions{}, LrnOptions{3, 0.5f, 0.5f, 1}})
      check_same([=](auto x) { return local_response_norm(x[0], o); }, {{2, channels, 3, 5}},
                 {2, channels, 3, 5}, 1e-5);
}

}  // namespace
}  // namespace topknot
