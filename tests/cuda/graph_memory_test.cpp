// What a graph writes to belongs to it, also between its replays.
#include "nn/core/cuda/pool.h"
#include "nn/core/tensor.h"
#include "tests/cuda/fixture.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

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
