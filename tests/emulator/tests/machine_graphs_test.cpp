// The CUDA emulator itself: graphs, what a capture takes and refuses, and the order in which a replay runs.
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/machine.h"

namespace topknot {
namespace {

using namespace testing;

// Two streams of a capture on the first, and a list of what ran.
struct Captured {
  Captured() {
    TOPKNOT_CUDA(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&fork, &join, &outside})
      TOPKNOT_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  ~Captured() {
    emulator::reset();
    drop();
    for (cudaEvent_t event : {fork, join, outside}) cudaEventDestroy(event);
    cudaStreamDestroy(side);
    cudaGetLastError();
  }
  void begin() { REQUIRE(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal) == cudaSuccess); }
  // Gives the capture's end, and keeps the graph.
  cudaError_t end() {
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(main, &graph);
    if (error == cudaSuccess) {
      drop();
      REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
      cudaGraphDestroy(graph);
    }
    return error;
  }
  cudaError_t drop() {
    return executable ? cudaGraphExecDestroy(std::exchange(executable, nullptr)) : cudaSuccess;
  }
  std::string replay() {
    list.clear();
    REQUIRE(cudaGraphLaunch(executable, main) == cudaSuccess);
    CHECK(list.empty());
    REQUIRE(cudaStreamSynchronize(main) == cudaSuccess);
    return list;
  }
  void does(cudaStream_t stream, char what) {
    emulator::enqueue(stream, [this, what] { list += what; });
  }
  void follow(cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
    REQUIRE(cudaEventRecord(event, earlier) == cudaSuccess);
    REQUIRE(cudaStreamWaitEvent(later, event, 0) == cudaSuccess);
  }

  OnGpu gpu;
  cudaStream_t main = gpu.stream(), side = nullptr;
  cudaEvent_t fork = nullptr, join = nullptr, outside = nullptr;
  cudaGraphExec_t executable = nullptr;
  std::string list;
};

TEST_CASE("emulator: a capture runs nothing; each launch runs all, on memory as it is then") {
  Captured capture;
  DeviceVector<int> from(std::vector<int>{5}), to(std::vector<int>{0});
  capture.begin();
  TOPKNOT_CUDA(cudaMemcpyAsync(to.data(), from.data(), 4, cudaMemcpyDeviceToDevice, capture.main));
  capture.does(capture.main, 'x');
  REQUIRE(capture.end() == cudaSuccess);
  CHECK(to.host()[0] == 0);
  CHECK(capture.list.empty());
  CHECK(capture.replay() == "x");
  CHECK(to.host()[0] == 5);
  from.set({6});
  CHECK(to.host()[0] == 5);
  CHECK(capture.replay() == "x");
  CHECK(to.host()[0] == 6);
  capture.does(capture.main, 'y');  // the capture has ended
  CHECK(cudaStreamSynchronize(capture.main) == cudaSuccess);
  CHECK(capture.list == "xy");
}

TEST_CASE("emulator: a branch of a graph runs as late as it may, and reversed as early, within its events") {
  Captured capture;
  capture.begin();
  capture.does(capture.main, 'a');
  capture.follow(capture.side, capture.main, capture.fork);
  capture.does(capture.side, '1');
  capture.does(capture.main, 'b');
  capture.does(capture.side, '2');
  capture.does(capture.main, 'c');
  capture.follow(capture.main, capture.side, capture.join);
  capture.does(capture.main, 'd');
  REQUIRE(capture.end() == cudaSuccess);
  CHECK(capture.replay() == "abc12d");
  CHECK(capture.replay() == "abc12d");
  emulator::machine().reverse = true;
  CHECK(capture.replay() == "a12bcd");
}

TEST_CASE("emulator: a branch that waits for a peer does not hold the others") {
  Captured capture;
  bool open = false;
  capture.begin();
  capture.follow(capture.side, capture.main, capture.fork);
  emulator::enqueue_when(capture.side, [&] { return open; });
  capture.does(capture.side, '1');
  capture.does(capture.main, 'a');
  capture.follow(capture.main, capture.side, capture.join);
  capture.does(capture.main, 'b');
  REQUIRE(capture.end() == cudaSuccess);
  emulator::machine().reverse = GENERATE(false, true);
  REQUIRE(cudaGraphLaunch(capture.executable, capture.main) == cudaSuccess);
  CHECK(cudaStreamQuery(capture.main) == cudaErrorNotReady);
  CHECK(capture.list == "a");
  open = true;
  CHECK(cudaStreamQuery(capture.main) == cudaSuccess);
  CHECK(capture.list == "a1b");  // nothing twice
}

TEST_CASE("emulator: work of a branch that is not joined spoils the graph") {
  Captured capture;
  capture.begin();
  capture.does(capture.main, 'a');
  capture.follow(capture.side, capture.main, capture.fork);
  SECTION("joined") {
    capture.does(capture.side, '1');
    capture.follow(capture.main, capture.side, capture.join);
    CHECK(capture.end() == cudaSuccess);
    CHECK(capture.replay() == "a1");
  }
  SECTION("never joined") {
    capture.does(capture.side, '1');
    CHECK(capture.end() == cudaErrorStreamCaptureUnjoined);
  }
  SECTION("without work of its own") {
    CHECK(capture.end() == cudaErrorStreamCaptureUnjoined);
  }
  SECTION("work behind the event that joins") {
    capture.does(capture.side, '1');
    REQUIRE(cudaEventRecord(capture.join, capture.side) == cudaSuccess);
    capture.does(capture.side, '2');
    REQUIRE(cudaStreamWaitEvent(capture.main, capture.join, 0) == cudaSuccess);
    CHECK(capture.end() == cudaErrorStreamCaptureUnjoined);
  }
  SECTION("joined by way of another branch") {
    cudaStream_t third = nullptr;
    TOPKNOT_CUDA(cudaStreamCreateWithFlags(&third, cudaStreamNonBlocking));
    capture.does(capture.side, '1');
    capture.follow(third, capture.side, capture.join);
    capture.does(third, '2');
    capture.follow(capture.main, third, capture.join);
    CHECK(capture.end() == cudaSuccess);
    CHECK(capture.replay() == "a12");
    cudaStreamDestroy(third);
  }
  // Also after an error both streams are as before the capture.
  capture.list.clear();
  capture.does(capture.side, 'z');
  CHECK(cudaStreamSynchronize(capture.side) == cudaSuccess);
  capture.does(capture.main, 'y');
  CHECK(cudaStreamSynchronize(capture.main) == cudaSuccess);
  CHECK(capture.list == "zy");
}

TEST_CASE("emulator: a call that a capture cannot hold fails, and spoils it") {
  Captured capture;
  REQUIRE(cudaEventRecord(capture.outside, capture.side) == cudaSuccess);
  const DeviceVector<int> memory(1);
  int on_host = 0;
  void* block = nullptr;
  const std::vector<std::function<cudaError_t()>> unsupported{
      [&] { return cudaStreamSynchronize(capture.main); }, [&] { return cudaStreamQuery(capture.main); },
      [&] { return cudaStreamSynchronize(capture.side); }, [&] { return cudaStreamQuery(capture.side); },
      [&] { return cudaEventQuery(capture.outside); }, [&] { return cudaEventSynchronize(capture.outside); },
      [&] { return cudaDeviceSynchronize(); }, [&] { return cudaMalloc(&block, 8); },
      [&] { return cudaHostAlloc(&block, 8, 0); }, [&] { return cudaFree(memory.data()); },
      [&] { return cudaMemcpy(&on_host, memory.data(), 4, cudaMemcpyDeviceToHost); },
      // memory that is not page-locked
      [&] { return cudaMemcpyAsync(&on_host, memory.data(), 4, cudaMemcpyDeviceToHost, capture.main); }};
  const auto gives = [&](const std::function<cudaError_t()>& call, cudaError_t error) {
    capture.begin();
    REQUIRE(cudaEventRecord(capture.fork, capture.main) == cudaSuccess);
    CHECK(call() == error);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CHECK(cudaStreamIsCapturing(capture.main, &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusInvalidated);
    CHECK(cudaEventRecord(capture.fork, capture.main) == cudaErrorStreamCaptureInvalidated);
    CHECK(capture.end() == cudaErrorStreamCaptureInvalidated);
  };
  for (std::size_t i = 0; i < unsupported.size(); ++i) {
    INFO("call " << i);
    gives(unsupported[i], cudaErrorStreamCaptureUnsupported);
  }
  gives([&] { return cudaStreamWaitEvent(capture.main, capture.outside, 0); },
        cudaErrorStreamCaptureIsolation);
  gives([&] { return cudaEventSynchronize(capture.fork); }, cudaErrorCapturedEvent);
  gives([&] { return cudaEventQuery(capture.fork); }, cudaErrorCapturedEvent);
  capture.begin();
  CHECK(cudaStreamBeginCapture(capture.main, cudaStreamCaptureModeThreadLocal) == cudaErrorIllegalState);
  CHECK(capture.end() == cudaSuccess);
  CHECK(cudaMalloc(&block, 8) == cudaSuccess);
  CHECK(cudaFree(block) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

// What cudaMalloc gives, in this thread or another one that has taken this mode, while this capture goes on.
cudaError_t malloc_beside(Captured& capture, cudaStreamCaptureMode mode, bool elsewhere,
                          cudaStreamCaptureMode of_thread) {
  REQUIRE(cudaStreamBeginCapture(capture.main, mode) == cudaSuccess);
  cudaError_t status = cudaSuccess;
  const auto allocate = [&] {
    cudaThreadExchangeStreamCaptureMode(&of_thread);
    void* block = nullptr;
    status = cudaMalloc(&block, 8);
    cudaThreadExchangeStreamCaptureMode(&of_thread);
  };
  if (elsewhere)
    std::thread(allocate).join();
  else
    allocate();
  CHECK(capture.end() == (status == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureInvalidated));
  return status;
}

TEST_CASE("emulator: the modes of a capture and of a thread say which of its calls are forbidden") {
  Captured capture;
  const auto global = cudaStreamCaptureModeGlobal, local = cudaStreamCaptureModeThreadLocal,
             relaxed = cudaStreamCaptureModeRelaxed;
  for (const auto mode : {global, local, relaxed})
    for (const auto of_thread : {global, local, relaxed})
      for (const bool elsewhere : {false, true}) {
        INFO("capture " << mode << ", thread " << of_thread << ", another " << elsewhere);
        const bool forbidden =
            elsewhere ? mode == global && of_thread == global : mode != relaxed && of_thread != relaxed;
        CHECK(malloc_beside(capture, mode, elsewhere, of_thread) ==
              (forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess));
      }
  capture.begin();
  cudaError_t ended = cudaSuccess, synchronised = cudaSuccess;
  std::thread([&] {
    synchronised = cudaDeviceSynchronize();
    cudaGraph_t graph = nullptr;
    ended = cudaStreamEndCapture(capture.main, &graph);
  }).join();
  CHECK(synchronised == cudaErrorStreamCaptureUnsupported);
  CHECK(ended == cudaErrorStreamCaptureWrongThread);
  CHECK(capture.end() == cudaErrorStreamCaptureInvalidated);
}

TEST_CASE("emulator: a graph may be launched again before it has run, and destroyed") {
  Captured capture;
  capture.begin();
  capture.does(capture.main, 'a'), capture.does(capture.main, 'b');
  REQUIRE(capture.end() == cudaSuccess);
  REQUIRE(cudaGraphLaunch(capture.executable, capture.main) == cudaSuccess);
  capture.does(capture.main, '-');
  REQUIRE(cudaGraphLaunch(capture.executable, capture.main) == cudaSuccess);
  CHECK(capture.drop() == cudaSuccess);
  CHECK(cudaStreamSynchronize(capture.main) == cudaSuccess);
  CHECK(capture.list == "ab-ab");
}

}  // namespace
}  // namespace topknot
