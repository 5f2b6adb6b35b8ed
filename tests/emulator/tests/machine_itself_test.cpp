// The CUDA emulator itself: streams, events, memory, failures. As late as a GPU might be, and as strict.
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/tests/child_process.h"
#include "tests/emulator/tests/machine_settings.h"

namespace topknot {
namespace {

using namespace testing;

struct Stream {
  Stream() { TOPKNOT_CUDA(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(handle); }
  operator cudaStream_t() const { return handle; }
  void synchronize() const { TOPKNOT_CUDA(cudaStreamSynchronize(handle)); }
  // Adds to the list what was done, when it is done.
  void does(std::string& list, char what) const {
    emulator::enqueue(handle, [&list, what] { list += what; });
  }
  cudaStream_t handle = nullptr;
};

struct Event {
  Event() { TOPKNOT_CUDA(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(handle); }
  operator cudaEvent_t() const { return handle; }
  void record(const Stream& stream) const { TOPKNOT_CUDA(cudaEventRecord(handle, stream)); }
  void hold(const Stream& stream) const { TOPKNOT_CUDA(cudaStreamWaitEvent(stream, handle, 0)); }
  cudaEvent_t handle = nullptr;
};

TEST_CASE("emulator: nothing is there before somebody waits for it") {
  const OnGpu gpu;
  const Stream stream, other;
  const DeviceVector<int> memory(std::vector<int>{1, 2, 3});
  std::vector<int> source{7, 8, 9}, seen(3, -1);
  TOPKNOT_CUDA(cudaMemcpyAsync(memory.data(), source.data(), 12, cudaMemcpyHostToDevice, stream));
  TOPKNOT_CUDA(cudaMemcpyAsync(seen.data(), memory.data(), 12, cudaMemcpyDeviceToHost, stream));
  CHECK(seen == std::vector<int>(3, -1));
  other.synchronize();  // is no wait for this one
  CHECK(seen == std::vector<int>(3, -1));
  source[1] = 80;  // too early: the copy has not been made
  stream.synchronize();
  CHECK(seen == std::vector<int>{7, 80, 9});
  TOPKNOT_CUDA(cudaMemsetAsync(memory.data(), 0, 12, stream));
  TOPKNOT_CUDA(cudaMemcpyAsync(seen.data(), memory.data(), 12, cudaMemcpyDeviceToHost, stream));
  CHECK(seen[0] == 7);
  TOPKNOT_CUDA(cudaDeviceSynchronize());
  CHECK(seen == std::vector<int>(3));
}

TEST_CASE("emulator: a stream waits for what an event had before it, and for no more") {
  const OnGpu gpu;
  const Stream a, b;
  const Event event, never;
  std::string list;
  a.does(list, 'a');
  event.record(a);
  a.does(list, 'A');
  b.does(list, 'b');
  never.hold(b);  // an event that was never recorded holds nothing
  event.hold(b);
  b.does(list, 'B');
  event.record(b);  // the wait is for the event as it was
  SECTION("the waiting stream draws the other along") {
    b.synchronize();
    CHECK(list == "baB");
    a.synchronize();
    CHECK(list == "baBA");
  }
  SECTION("the other does not run the waiting one") {
    a.synchronize();
    CHECK(list == "aA");
  }
  SECTION("a host that waits for the event gets what is before it") {
    TOPKNOT_CUDA(cudaEventSynchronize(event));
    CHECK(list == "baB");
  }
  TOPKNOT_CUDA(cudaDeviceSynchronize());
  CHECK(list.size() == 4);
}

TEST_CASE("emulator: without an event, streams do not see each other's work") {
  const OnGpu gpu;
  const Stream a, b;
  const DeviceVector<int> memory(std::vector<int>{1});
  int seen = 0;
  TOPKNOT_CUDA(cudaMemsetAsync(memory.data(), 0, 4, a));
  TOPKNOT_CUDA(cudaMemcpyAsync(&seen, memory.data(), 4, cudaMemcpyDeviceToHost, b));
  b.synchronize();
  CHECK(seen == 1);
}

TEST_CASE("emulator: work that has to wait holds its own stream only") {
  const OnGpu gpu;
  const Stream a, b;
  std::string list;
  bool open = false;
  emulator::enqueue_when(a, [&] { return open; });
  a.does(list, 'a');
  b.does(list, 'b');
  CHECK(cudaStreamQuery(a) == cudaErrorNotReady);
  CHECK(cudaStreamQuery(b) == cudaSuccess);
  CHECK(list == "b");
  open = true;
  CHECK(cudaStreamQuery(a) == cudaSuccess);
  CHECK(list == "ba");
  cudaGetLastError();
}

TEST_CASE("emulator: the default stream is refused for everything") {
  const OnGpu gpu;
  const DeviceVector<int> memory(4);
  const Event event;
  int host[4] = {};
  CHECK(cudaMemcpyAsync(host, memory.data(), 16, cudaMemcpyDeviceToHost, nullptr) ==
        cudaErrorInvalidResourceHandle);
  CHECK(cudaMemsetAsync(memory.data(), 0, 16, nullptr) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventRecord(event, nullptr) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamWaitEvent(nullptr, event, 0) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamSynchronize(nullptr) == cudaErrorInvalidResourceHandle);
  CHECK(cudaLaunchHostFunc(
            nullptr, [](void*) {}, nullptr) == cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

TEST_CASE("emulator: fresh memory, and what lies beside a block, is no number") {
  const OnGpu gpu;
  for (const std::size_t n : {1, 3, 64, 1000}) {
    float* block = nullptr;
    TOPKNOT_CUDA(cudaMalloc(reinterpret_cast<void**>(&block), n * sizeof(float)));
    bool number = false;
    for (std::ptrdiff_t i = -60; i < std::ptrdiff_t(n) + 60; ++i) number = number || !std::isnan(block[i]);
    CHECK_FALSE(number);
    CHECK(cudaFree(block) == cudaSuccess);
  }
}

TEST_CASE("emulator: who writes beside a block, and be it a byte, ends the program when it is freed") {
  const auto write_at = [](std::ptrdiff_t offset, std::size_t bytes) {
    return run_in_child([=] {
      const OnGpu gpu;
      char* block = nullptr;
      TOPKNOT_CUDA(cudaMalloc(reinterpret_cast<void**>(&block), bytes));
      TOPKNOT_CUDA(cudaMemsetAsync(block + offset, 0, 1, gpu.stream()));
      TOPKNOT_CUDA(cudaFree(block));
    });
  };
  for (const std::size_t bytes : {1, 5, 256, 1000}) {
    const auto end = std::ptrdiff_t(bytes);
    for (const std::ptrdiff_t offset : {std::ptrdiff_t{-256}, std::ptrdiff_t{-1}, end, end + 1, end + 255}) {
      INFO("offset " << offset << " of " << bytes);
      const ChildEnd ended = write_at(offset, bytes);
      CHECK(ended.aborted);
      CHECK(says(ended.text, {"beside a block of " + std::to_string(bytes) + " bytes"}));
    }
    CHECK_FALSE(write_at(0, bytes).aborted);
    CHECK_FALSE(write_at(end - 1, bytes).aborted);
  }
}

TEST_CASE("emulator: memory is given back once, after the work that was waiting") {
  const OnGpu gpu;
  const std::size_t before = emulator::counts().bytes_in_use;
  void* block = nullptr;
  TOPKNOT_CUDA(cudaMalloc(&block, 100));
  CHECK(emulator::counts().bytes_in_use == before + 100);
  unsigned char seen = 0;
  TOPKNOT_CUDA(cudaMemsetAsync(block, 5, 100, gpu.stream()));
  TOPKNOT_CUDA(cudaMemcpyAsync(&seen, block, 1, cudaMemcpyDeviceToHost, gpu.stream()));
  TOPKNOT_CUDA(cudaFree(block));
  CHECK(seen == 5);
  CHECK(emulator::counts().bytes_in_use == before);
  CHECK(cudaFree(block) == cudaErrorInvalidValue);
  cudaGetLastError();
}

TEST_CASE("emulator: a call fails from the one on that a test names, until reset") {
  const emulator::Settings settings;
  const OnGpu gpu;
  emulator::fail("cudaMalloc", cudaErrorMemoryAllocation, 2);
  const auto allocate = [] {
    void* block = nullptr;
    const cudaError_t error = cudaMalloc(&block, 8);
    if (error == cudaSuccess) cudaFree(block);
    return error;
  };
  for (const cudaError_t error :
       {cudaSuccess, cudaSuccess, cudaErrorMemoryAllocation, cudaErrorMemoryAllocation})
    CHECK(allocate() == error);
  CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaSuccess);  // once
  emulator::fail("another library's call", 17);
  CHECK(emulator::injected("another library's call") == 17);
  emulator::reset();
  CHECK(emulator::injected("another library's call") == 0);
  CHECK(allocate() == cudaSuccess);
}

TEST_CASE("emulator: on a lost device every call fails, and work that waits is not done") {
  const emulator::Settings settings;
  const OnGpu gpu;
  const Stream stream;
  std::string list;
  stream.does(list, 'x');
  emulator::lose_device();
  CHECK(cudaStreamSynchronize(stream) == cudaErrorUnknown);
  CHECK(cudaDeviceSynchronize() == cudaErrorUnknown);
  void* block = nullptr;
  CHECK(cudaMalloc(&block, 8) == cudaErrorUnknown);
  CHECK(cudaGetLastError() == cudaErrorUnknown);
  CHECK(cudaGetLastError() == cudaErrorUnknown);  // for good
  CHECK(list.empty());
  emulator::reset();
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(list == "x");
}

TEST_CASE("emulator: a wait for the device is for this thread's device") {
  const emulator::Settings settings;
  emulator::machine().devices = 2;
  const OnGpu gpu;
  const Stream here;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  const Stream there;
  std::string list;
  here.does(list, 'h'), there.does(list, 't');
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(list == "t");
  CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(list == "th");
  cudaGetLastError();
}

}  // namespace
}  // namespace topknot
