// Memory, copies and the elementwise work of the device backend.
#include "nn/core/parameter.h"
#include "nn/core/rng.h"
#include "tests/cuda/fixture.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

TEST_CASE("a tensor goes to the GPU and comes back as it was") {
  const OnGpu gpu;
  const std::vector<float> values{1, -2, 3.5f, 0, -0.0f};
  CHECK(Tensor::from(values, {5}, gpu.device()).to_vector() == values);
  CHECK(Tensor::zeros({3}, Layout::plain, gpu.device()).to_vector() == std::vector<float>(3));
}

TEST_CASE("sums on the GPU are the CPU's, of any length") {
  const OnGpu gpu;
  for (const std::int64_t n : {1, 31, 255, 256, 1025, 4099}) {
    std::vector<float> a, b, sum;
    for (std::int64_t i = 0; i < n; ++i) {
      a.push_back(0.1f * static_cast<float>(i)), b.push_back(1.0f / static_cast<float>(i + 1));
      sum.push_back(a.back() + b.back());
    }
    const Tensor x = Tensor::from(a, {n}, gpu.device()), y = Tensor::from(b, {n}, gpu.device());
    Tensor z = Tensor::empty_like(x);
    backend(gpu.device()).add(DType::f32, x.data(), y.data(), z.data(), static_cast<std::size_t>(n));
    CHECK(z.to_vector() == sum);
  }
}

TEST_CASE("parameters start from the same bits on a GPU") {
  const OnGpu gpu;
  const auto build = [](ParameterStore& store) {
    store.add("a", {3, 5}, [](std::span<float> v, const CounterRng& rng) {
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = rng.normal(i);
    });
    store.add_buffer("mean", 4, 0.25f);
    return store.build([](const Parameter&) { return true; }, 7).host_weights();
  };
  ParameterStore on_cpu, on_gpu(gpu.device());
  CHECK(build(on_gpu) == build(on_cpu));
  on_gpu.buffers()[0]->values.assign(4, 0.0f);
  on_gpu.statistics_to_host();
  CHECK(on_gpu.buffers()[0]->values == std::vector<float>(4, 0.25f));
}

}  // namespace
}  // namespace topknot
