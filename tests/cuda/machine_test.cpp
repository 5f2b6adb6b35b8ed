// Memory, copies and sums of a GPU, and the memory of graphs.
#include "nn/core/cuda/pool.h"
#include "nn/core/parameter.h"
#include "nn/core/rng.h"
#include "tests/cuda/fixture.h"

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
      a.push_back(0.1f * float(i)), b.push_back(1.0f / float(i + 1));
      sum.push_back(a.back() + b.back());
    }
    const Tensor x = Tensor::from(a, {n}, gpu.device()), y = Tensor::from(b, {n}, gpu.device());
    Tensor z = Tensor::empty_like(x);
    backend(gpu.device()).add(DType::f32, x.data(), y.data(), z.data(), std::size_t(n));
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

// What a graph writes to belongs to it, also between its replays.

TEST_CASE("memory taken after a capture is not the graph's") {
  const OnGpu gpu;
  const Device device = gpu.device();
  Tensor result = Tensor::empty({1000}, Layout::plain, device);
  const auto work = [&] {
    Tensor scratch = Tensor::empty({1000}, Layout::plain, device);
    backend(device).fill(scratch.data(), 1000, 2.0f);
    backend(device).add(DType::f32, scratch.data(), scratch.data(), result.data(), 1000);
  };
  work();  // the pool has a block of this size now
  cuda::GraphMemory memory(gpu.pool());
  const cuda::Graph graph(gpu.stream(), memory, work);
  Tensor later = Tensor::empty({1000}, Layout::plain, device);
  backend(device).fill(later.data(), 1000, 7.0f);
  graph.launch(gpu.stream());
  CHECK(result.to_vector() == std::vector<float>(1000, 4.0f));
  CHECK(later.to_vector() == std::vector<float>(1000, 7.0f));
}

TEST_CASE("graphs of one stream share their memory, and give it back") {
  const OnGpu gpu;
  const Device device = gpu.device();
  const auto work = [&] {
    Tensor scratch = Tensor::empty({5000}, Layout::plain, device);
    backend(device).fill(scratch.data(), 5000, 1.0f);
  };
  work();
  const std::size_t reserved = gpu.pool()->reserved();
  {
    cuda::GraphMemory memory(gpu.pool());
    const cuda::Graph first(gpu.stream(), memory, work), second(gpu.stream(), memory, work);
    first.launch(gpu.stream()), second.launch(gpu.stream());
    CHECK(gpu.pool()->reserved() == reserved);
  }
  work();
  CHECK(gpu.pool()->reserved() == reserved);
}

TEST_CASE("a capture takes new memory where none is cached, and the graph keeps it") {
  const OnGpu gpu;
  const Device device = gpu.device();
  Tensor result = Tensor::empty({12345}, Layout::plain, device);
  cuda::GraphMemory memory(gpu.pool());
  const std::size_t reserved = gpu.pool()->reserved();
  const cuda::Graph graph(gpu.stream(), memory, [&] {
    Tensor scratch = Tensor::empty({12345}, Layout::plain, device);
    backend(device).fill(scratch.data(), 12345, 3.0f);
    backend(device).add(DType::f32, scratch.data(), scratch.data(), result.data(), 12345);
  });
  CHECK(gpu.pool()->reserved() - reserved == cuda::Pool::rounded(12345 * sizeof(float)));
  Tensor other = Tensor::zeros({12345}, Layout::plain, device);
  graph.launch(gpu.stream());
  CHECK(result.to_vector() == std::vector<float>(12345, 6.0f));
  CHECK(other.to_vector() == std::vector<float>(12345));
}

TEST_CASE("a graph makes do with the memory of the step before, also where sizes are close") {
  const OnGpu gpu;
  const Device device = gpu.device();
  { const Tensor cached = Tensor::empty({11520}, Layout::plain, device); }
  const auto work = [&] {
    { const Tensor first = Tensor::empty({12800}, Layout::plain, device); }
    const Tensor second = Tensor::empty({11520}, Layout::plain, device);  // would fit into the first's memory
    const Tensor third = Tensor::empty({12800}, Layout::plain, device);
  };
  work();
  const std::size_t reserved = gpu.pool()->reserved();
  cuda::GraphMemory memory(gpu.pool());
  cudaStream_t stream = gpu.stream();
  const cuda::Graph graph(stream, memory, work);
  CHECK(gpu.pool()->reserved() == reserved);
}

}  // namespace
}  // namespace topknot
