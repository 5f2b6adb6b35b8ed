// What fails on a GPU ends in one message; a call of libtopknot that fails changes nothing.
#include "nn/core/tensor.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/library/library_fixture.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

TEST_CASE("a GPU out of memory names the size asked for and what to lower") {
  const emulator::Settings settings;
  emulator::machine().memory = emulator::counts().bytes_in_use + (1 << 20);
  const OnGpu gpu;
  const auto allocate = [&] { Tensor::empty({1 << 20}, Layout::plain, gpu.device()); };
  CHECK_THROWS_AS(allocate(), cuda::OutOfMemory);
  CHECK(says(error_text(allocate), {"rank 0", "4.0 MiB asked for", "batch size"}));
}

TEST_CASE("cached blocks are given back before memory is called short") {
  const emulator::Settings settings;
  emulator::machine().memory = emulator::counts().bytes_in_use + (3 << 20);
  const OnGpu gpu;
  for (const std::int64_t floats : {1 << 19, 1 << 18, 3 << 17})
    CHECK(Tensor::zeros({floats}, Layout::plain, gpu.device()).to_vector()[0] == 0);
}

TEST_CASE("what another rank on the GPU keeps for reuse is given back too") {
  const emulator::Settings settings;
  const OnGpu keeps(cuda::Precision::fp32, true, true), needs(cuda::Precision::fp32, true, true);
  emulator::machine().memory = emulator::counts().bytes_in_use + (3 << 20);
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
  emulator::machine().memory = emulator::counts().bytes_in_use + (1 << 20);
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

namespace {

constexpr std::size_t kNumel = 64 * 1024;

Handle make() {
  return testing::make("topk", {"device=cuda"}, 0, 1, {{"weight", {64, 1024}}});
}

// One rank's step up to its commit; null where a call fails.
topknot_round* decoded(const Handle& compressor, double density, const DeviceVector<float>& gradient) {
  const topknot_step context{0, density, 0};
  const std::int32_t which = 0;
  const void* from = gradient.data();
  topknot_round* round = nullptr;
  if (topknot_encode(compressor.get(), &context, &which, 1, &from, TOPKNOT_FLOAT32, 1, &round) != TOPKNOT_OK)
    return nullptr;
  topknot_message message;
  REQUIRE(topknot_message_of(round, &message) == TOPKNOT_OK);
  REQUIRE(topknot_decode(round, &message.block, &message.block_bytes) == TOPKNOT_DONE);
  return round;
}
topknot_result commit(topknot_round* round, const DeviceVector<float>& average) {
  void* to = average.data();
  return topknot_commit(round, &to, TOPKNOT_FLOAT32, 1);
}
bool step(const Handle& compressor, double density, const DeviceVector<float>& gradient,
          const DeviceVector<float>& average) {
  topknot_round* const round = decoded(compressor, density, gradient);
  return round && commit(round, average) == TOPKNOT_OK;
}

TEST_CASE("libtopknot on a GPU: a step without memory for its density can be made again") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel), expected(kNumel);
  const Handle compressor = make(), other = make();
  for (const Handle* each : {&compressor, &other})
    REQUIRE(step(*each, 0.01, gradient, each == &other ? expected : average));
  for (int call = 0; call < 4; ++call) {
    const emulator::Settings settings;
    emulator::fail("cudaMalloc", cudaErrorMemoryAllocation, call);
    if (step(compressor, 0.2, gradient, average)) break;
    CHECK(says(topknot_error(), {"GPU 0 is out of memory"}));
  }
  for (const double density : {0.01, 0.2, 0.01}) {
    REQUIRE(step(compressor, density, gradient, average));
    REQUIRE(step(other, density, gradient, expected));
    CHECK((average.host() == expected.host()));
  }
}

TEST_CASE("libtopknot on a GPU: a commit that fails ends its round, and says that the library failed") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel);
  const Handle compressor = make();
  topknot_round* const round = decoded(compressor, 0.01, gradient);
  REQUIRE(round);
  {
    const emulator::Settings settings;
    emulator::fail("cudaMemcpyAsync", cudaErrorInvalidValue);
    CHECK(commit(round, average) == TOPKNOT_FAILED);
  }
  CHECK(step(compressor, 0.01, gradient, average));
}

TEST_CASE("libtopknot on a GPU: the memory of a higher density is given back") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel);
  const Handle compressor = make();
  REQUIRE(step(compressor, 0.01, gradient, average));
  const std::size_t before = emulator::counts().bytes_in_use;
  REQUIRE(step(compressor, 0.25, gradient, average));
  REQUIRE(emulator::counts().bytes_in_use > before);
  REQUIRE(step(compressor, 0.01, gradient, average));
  CHECK(emulator::counts().bytes_in_use <= before + before / 10);
}

TEST_CASE("libtopknot on a GPU: the thread's own GPU stays its current one") {
  const emulator::Gpus two(2);
  const OnGpu program;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  int current = 0;
  {
    const Handle compressor = make();
    REQUIRE(cudaGetDevice(&current) == cudaSuccess);
    CHECK(current == 1);
  }
  REQUIRE(cudaGetDevice(&current) == cudaSuccess);
  CHECK(current == 1);
  cudaSetDevice(0);
}

}  // namespace
