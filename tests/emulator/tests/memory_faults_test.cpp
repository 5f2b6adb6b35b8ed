// What fails on a GPU ends in one message.
#include <cmath>
#include <cstdlib>

#include "nn/core/cuda/pool.h"
#include "nn/core/tensor.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/machine.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

TEST_CASE("a GPU out of memory names the size asked for and what to lower") {
  const emulator::Settings settings;
  emulator::machine().memory = emulator::bytes_in_use() + (1 << 20);
  const OnGpu gpu;
  const auto allocate = [&] { Tensor::empty({1 << 20}, Layout::plain, gpu.device()); };
  CHECK_THROWS_AS(allocate(), cuda::OutOfMemory);
  CHECK(says(error_text(allocate), {"rank 0", "4.0 MiB asked for", "batch size"}));
}

TEST_CASE("cached blocks are given back before memory is called short") {
  const emulator::Settings settings;
  emulator::machine().memory = emulator::bytes_in_use() + (3 << 20);
  const OnGpu gpu;
  for (const std::int64_t floats : {1 << 19, 1 << 18, 3 << 17})
    CHECK(Tensor::zeros({floats}, Layout::plain, gpu.device()).to_vector()[0] == 0);
}

TEST_CASE("what another rank on the GPU keeps for reuse is given back too") {
  const emulator::Settings settings;
  const OnGpu keeps(cuda::Precision::fp32, true, true), needs(cuda::Precision::fp32, true, true);
  emulator::machine().memory = emulator::bytes_in_use() + (3 << 20);
  keeps.pool()->release(keeps.pool()->allocate(2 << 20));
  void* data = nullptr;
  REQUIRE_NOTHROW(data = needs.pool()->allocate(2 << 20));
  CHECK(keeps.pool()->reserved() == 0);
  needs.pool()->release(data);
  // In use elsewhere it is not to be had.
  data = keeps.pool()->allocate(2 << 20);
  CHECK_THROWS_AS(needs.pool()->allocate(2 << 20), cuda::OutOfMemory);
  keeps.pool()->release(data);
}

#ifdef TOPKNOT_POISON
TEST_CASE("a build with TOPKNOT_POISON hands a GPU's memory out as NaNs, also when it is used again") {
  const OnGpu gpu;
  for (int use = 0; use < 2; ++use) {
    testing::DeviceVector<float> memory(1000);
    for (const float value : memory.host()) CHECK(std::isnan(value));
    memory.set(std::vector<float>(1000, 1.0f));
  }
}
#endif

TEST_CASE("a capture without memory says so, and the stream is of use afterwards") {
  const emulator::Settings settings;
  emulator::machine().memory = emulator::bytes_in_use() + (1 << 20);
  const OnGpu gpu;
  const Device device = gpu.device();
  cuda::GraphMemory memory(gpu.pool());
  const auto record = [&] {
    const cuda::Graph graph(gpu.stream(), memory, [&] { Tensor::empty({1 << 20}, Layout::plain, device); });
  };
  CHECK_THROWS_AS(record(), cuda::OutOfMemory);
  CHECK(says(error_text(record), {"a graph is being recorded", "4.0 MiB", "train.graphs=false"}));
  CHECK(Tensor::zeros({3}, Layout::plain, device).to_vector() == std::vector<float>(3));
}

TEST_CASE("a capture rejects copies of pageable memory, and events of an earlier capture outside of it") {
  const OnGpu gpu;
  const Device device = gpu.device();
  Tensor data = Tensor::zeros({4}, Layout::plain, device);
  cuda::GraphMemory memory(gpu.pool());
  cuda::Event event;
  float host[4] = {};
  const auto copying = [&](const void* from) {
    const cuda::Graph graph(gpu.stream(), memory, [&] {
      TOPKNOT_CUDA(cudaMemcpyAsync(data.data(), from, sizeof host, cudaMemcpyHostToDevice, gpu.stream()));
      event.record(gpu.stream());
    });
  };
  CHECK_THROWS_AS(copying(host), cuda::CudaError);
  const cuda::PinnedMemory locked(sizeof host);
  CHECK_NOTHROW(copying(locked.data()));
  CHECK_THROWS_AS(event.wait(gpu.stream()), cuda::CudaError);
}

TEST_CASE("a lost GPU is called lost, with the rank") {
  const emulator::Settings settings;
  const OnGpu gpu;
  const Tensor x = Tensor::zeros({4}, Layout::plain, gpu.device());
  emulator::lose_device();
  CHECK(says(error_text([&] { x.to_vector(); }), {"the GPU is lost", "rank 0"}));
}

TEST_CASE("ranks that share a GPU get as many hardware queues as there are, unless the user asks for fewer") {
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  CHECK(cuda_problem().empty());
  CHECK(std::string(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS")) == "32");
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4", 1);
  CHECK(cuda_problem().empty());
  CHECK(std::string(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS")) == "4");
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
}

TEST_CASE("no GPU and too old a driver are told apart") {
  const emulator::Settings settings;
  emulator::machine().devices = 0;
  CHECK(says(error_text([] { parse_device("cuda"); }), {"no GPU was found", "train.device=cpu"}));
  CHECK(parse_device("auto") == Device{});
  emulator::machine().devices = 1;
  emulator::machine().driver_too_old = true;
  CHECK(says(error_text([] { parse_device("cuda"); }), {"driver is too old", "train.device=cpu"}));
  emulator::machine() = {};
  CHECK(parse_device("auto").kind == DeviceKind::cuda);
}

}  // namespace
}  // namespace topknot
