// What a graph writes to belongs to it, also between its replays.
#include "nn/core/cuda_graph.h"
#include "nn/core/device_kernels.h"
#include "nn/core/tensor.h"
#include "tests/cuda/fixture.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

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

TEST_CASE("a capture that needs new memory says so, and the stream is of use afterwards") {
  const OnGpu gpu;
  const Device device = gpu.device();
  cuda::GraphMemory memory(gpu.pool());
  const auto record = [&] {
    const cuda::Graph graph(gpu.stream(), memory, [&] { Tensor::empty({12345}, Layout::plain, device); });
  };
  CHECK(says(error_text(record), {"a graph is being recorded", "train.graphs=false"}));
  CHECK(Tensor::zeros({3}, Layout::plain, device).to_vector() == std::vector<float>(3));
}

}  // namespace
}  // namespace topknot
