// relu, add and dropout on a GPU are the CPU's, bit for bit; with bfloat16 activations, rounded once.
#include "nn/ops/ops.h"

#include <limits>

#include "tests/cuda/device_vector.h"
#include "tests/cuda/probe.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace testing;

// Odd sizes leave elements over after the last 16 bytes.
const std::vector<Shape> kShapes{{2, 16, 3, 5}, {3, 5, 7, 3}, {1, 1, 1, 1},
                                 {4, 1, 9, 9},  {5, 33},      {2, 8, 1, 1}};

void check_same(const Op& op, int inputs, bool bf16) {
  const OnGpu gpu(bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
  for (const Shape& shape : kShapes) {
    INFO(shape.str());
    const auto made = [&](std::uint32_t stream) {
      auto values = random_values(shape.numel(), stream);
      return bf16 ? rounded_to(DType::bf16, values) : values;
    };
    std::vector<Input> x;
    for (int i = 0; i < inputs; ++i) x.push_back({shape, made(static_cast<std::uint32_t>(i))});
    x[0].values[0] = -0.0f;
    const auto dy = made(9);
    Probe expected = probe(op, x, dy, false);
    if (bf16) {
      expected.value = rounded_to(DType::bf16, expected.value);
      for (auto& gradient : expected.gradients) gradient = rounded_to(DType::bf16, gradient);
    }
    const Probe actual = probe(op, x, dy, true);
    CHECK(same_bits(actual.value, expected.value));
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(same_bits(actual.gradients[i], expected.gradients[i]));
  }
}

TEST_CASE("relu on a GPU is the CPU's") {
  for (const bool bf16 : {false, true}) check_same([](auto x) { return relu(x[0]); }, 1, bf16);
}

TEST_CASE("relu on a GPU lets a NaN through and a negative zero not") {
  const OnGpu gpu;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Probe y =
      probe([](auto x) { return relu(x[0]); }, {{{5}, {nan, -0.0f, 0, -1, 2}}}, {1, 2, 3, 4, 5}, true);
  CHECK(std::isnan(y.value[0]));
  CHECK(same_bits(std::vector<float>(y.value.begin() + 1, y.value.end()), {0, 0, 0, 2}));
  CHECK(y.gradients[0] == std::vector<float>{1, 0, 0, 0, 5});
}

TEST_CASE("relu6, clamp, hardswish, sigmoid and silu on a GPU are the CPU's") {
  for (const bool bf16 : {false, true}) {
    check_same([](auto x) { return relu6(x[0]); }, 1, bf16);
    check_same([](auto x) { return clamp(x[0], -0.5f, 0.75f); }, 1, bf16);
    check_same([](auto x) { return hardswish(x[0]); }, 1, bf16);
    check_same([](auto x) { return sigmoid(x[0]); }, 1, bf16);
    check_same([](auto x) { return silu(x[0]); }, 1, bf16);
  }
}

TEST_CASE("add on a GPU is the CPU's, and both inputs take the gradient") {
  for (const bool bf16 : {false, true}) check_same([](auto x) { return add(x[0], x[1]); }, 2, bf16);
}

TEST_CASE("add on a GPU takes inputs of two layouts") {
  const OnGpu gpu;
  const Shape shape{2, 3, 4, 5};
  const auto a = random_values(shape.numel(), 1), b = random_values(shape.numel(), 2);
  const Variable left(cuda::to_activation(Tensor::from(a, shape)));
  const Variable right(Tensor::from(b, shape, gpu.device()));
  const Variable y = add(left, right);
  CHECK(y.value().layout() == Layout::nhwc);
  CHECK(cuda::to_plain(y.value()).to_vector() ==
        add(Variable(Tensor::from(a, shape)), Variable(Tensor::from(b, shape))).value().to_vector());
}

TEST_CASE("dropout on a GPU takes the CPU's numbers in any layout, backward too") {
  for (const bool bf16 : {false, true})
    for (const float p : {0.25f, 0.9f})
      check_same([=](auto x) { return dropout(x[0], p, CounterRng(5, RngUse::dropout, 3, 9)); }, 1, bf16);
}

TEST_CASE("a captured dropout draws anew for each step's word") {
  const OnGpu gpu;
  const Shape shape{2, 8, 3, 3};
  const auto values = random_values(shape.numel(), 1);
  const DeviceVector<std::uint32_t> step(std::vector<std::uint32_t>{77});
  const Tensor x = cuda::to_activation(Tensor::from(values, shape));
  const auto draw = [&] {
    return dropout(Variable(x), 0.5f, CounterRng(5, RngUse::dropout, 0, 9), step.data());
  };
  draw();  // a capture takes the memory that this gives back
  Variable y;
  CapturedGraph graph(gpu.stream(), [&] { y = draw(); });
  for (const std::uint32_t s : {0u, 1u, 4000000000u}) {
    to_device(step.data(), std::vector<std::uint32_t>{s});
    graph.launch(gpu.stream());
    const Variable expected =
        dropout(Variable(Tensor::from(values, shape)), 0.5f, CounterRng(5, RngUse::dropout, s, 9));
    CHECK(same_bits(cuda::to_plain(y.value()).to_vector(), expected.value().to_vector()));
  }
}

TEST_CASE("the checksum of weights on a GPU is the CPU's, slice by slice") {
  const OnGpu gpu;
  std::vector<float> values = random_values(70001, 3);
  values[7] = -0.0f, values[8] = NAN;
  const DeviceVector<float> there(values);
  std::vector<std::span<const float>> here, on_gpu;
  for (const auto& [begin, length] :
       std::vector<std::pair<std::size_t, std::size_t>>{{0, 0}, {0, 1}, {1, 300}, {7, 2}, {3, 69998}}) {
    here.emplace_back(values.data() + begin, length);
    on_gpu.emplace_back(there.data() + begin, length);
  }
  CHECK(backend(gpu.device()).checksums(on_gpu) == cpu_backend().checksums(here));
}

}  // namespace
}  // namespace topknot
