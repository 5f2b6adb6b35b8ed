// The kernels around a convolution: exact, and in an order of sums that nothing but the shape decides.
#include "nn/ops/cuda/products.h"

#include <cmath>

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using testing::DeviceVector;
using testing::random_values;

std::vector<float> floats(const std::vector<BFloat16>& values) {
  std::vector<float> out(values.size());
  to_float(values.data(), values.size(), out.data());
  return out;
}

}  // namespace

TEST_CASE("a bias is added to its channel") {
  const OnGpu gpu;
  for (const std::size_t channels : {1u, 3u, 10u, 64u, 257u, 1000u}) {
    const std::size_t rows = 17;
    const auto y = random_values(static_cast<std::int64_t>(rows * channels), 1),
               bias = random_values(static_cast<std::int64_t>(channels), 2);
    std::vector<float> expected = y, expected_half = testing::rounded_to(DType::bf16, y);
    for (std::size_t i = 0; i < y.size(); ++i)
      expected[i] += bias[i % channels], expected_half[i] += bias[i % channels];
    const DeviceVector<float> on_gpu(y), b(bias);
    cuda::add_bias(gpu.stream(), on_gpu.data(), false, b.data(), rows, channels);
    CHECK(on_gpu.host() == expected);
    std::vector<BFloat16> half(y.size());
    to_bfloat16(y.data(), y.size(), half.data());
    const DeviceVector<BFloat16> half_on_gpu(half);
    cuda::add_bias(gpu.stream(), half_on_gpu.data(), true, b.data(), rows, channels);
    CHECK(floats(half_on_gpu.host()) == testing::rounded_to(DType::bf16, expected_half));
  }
}

TEST_CASE("column sums are right for any number of rows and channels, and always the same bits") {
  const OnGpu gpu;
  struct Size {
    std::size_t rows, channels;
  };
  for (const Size s : {Size{1, 1}, {7, 3}, {255, 33}, {257, 16}, {1025, 100}, {300000, 2}}) {
    const auto n = static_cast<std::int64_t>(s.rows * s.channels);
    const auto x = testing::rounded_to(DType::bf16, random_values(n, 1));  // the same sums of either type
    std::vector<double> sums(s.channels), scale(s.channels);
    for (std::size_t i = 0; i < x.size(); ++i)
      sums[i % s.channels] += static_cast<double>(x[i]),
          scale[i % s.channels] += std::abs(static_cast<double>(x[i]));
    std::vector<BFloat16> rounded(x.size());
    to_bfloat16(x.data(), x.size(), rounded.data());
    const DeviceVector<float> full(x), scratch(cuda::column_sums_scratch(s.rows, s.channels));
    const DeviceVector<BFloat16> half(rounded);
    const DeviceVector<float> out(std::vector<float>(s.channels, 3.0f));
    const auto run = [&](bool bf16, bool accumulate) {
      cuda::column_sums(gpu.stream(), bf16 ? static_cast<const void*>(half.data()) : full.data(), bf16,
                        s.rows, s.channels, scratch.data(), out.data(), accumulate);
      return out.host();
    };
    const auto first = run(false, false);
    testing::check_close("sums", first, sums, scale, 1e-6);
    CHECK(run(true, false) == first);
    std::vector<float> twice = first;
    for (float& value : twice) value += value;
    CHECK(run(false, true) == twice);
  }
}

}  // namespace topknot
