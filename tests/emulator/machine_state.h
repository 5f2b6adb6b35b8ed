#pragma once
// Inside the machine of machine.h: what it holds, and how work gets onto a stream and is carried out. For the
// files that stand in for CUDA's run-time library: device.cpp, memory.cpp, streams.cpp, graphs.cpp.

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/emulator/machine.h"

namespace topknot::emulator {

using Work = std::function<bool()>;  // false: it has to wait for another stream
using Clock = std::chrono::steady_clock;

// What a capture recorded, by the streams that took part in it.
struct Graph {
  struct Node {
    Work work;  // none: a wait, until another branch is as far
    std::size_t branch = 0, target = 0;
  };
  struct Branch {
    const void* stream;
    std::vector<Node> nodes;
  };
  std::vector<Branch> branches;  // the first is that of the stream whose capture it is
  bool ended = false;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread = std::this_thread::get_id();  // that has begun it
  bool invalid = false;  // a call came that a capture forbids: only its end may follow

  std::size_t branch_of(const void* stream);  // made where there is none
  // Whether the first branch has waited for all work of the others, be it through one another.
  bool joined() const;
};

struct Stream {
  std::deque<Work> waiting;
  std::uint64_t enqueued = 0, done = 0;
  bool running = false;
  std::shared_ptr<Graph> capture;
  int device = 0;
};

struct Event {
  std::shared_ptr<Stream> stream;  // null: never recorded
  std::uint64_t target = 0;
  std::shared_ptr<Graph> capture;  // recorded into a graph
  std::shared_ptr<Clock::time_point> time = std::make_shared<Clock::time_point>();
};

struct State {
  std::recursive_mutex mutex;
  Machine machine;
  std::map<Stream*, std::shared_ptr<Stream>> streams;
  std::map<char*, std::size_t> memory;                  // device blocks, as handed out
  std::map<const char*, std::size_t> locked;            // page-locked host memory
  std::map<std::string, std::pair<int, int>> failures;  // code, calls that still succeed
  Counts counts;
  bool lost = false;
  Clock::duration passed{};  // added to the clock of events
};

State& state();

struct ThisThread {
  cudaError_t last_error = cudaSuccess;
  int device = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
};
ThisThread& this_thread();

// Notes an error for cudaGetLastError, and returns it.
cudaError_t result(cudaError_t error);
// What a call of this name returns before it does anything: the error that a test wants, or cudaSuccess.
cudaError_t refused(const char* call);

// Under the lock. Spoils the capture, and gives the error.
cudaError_t invalidate(Graph& capture, cudaError_t error);
// Under the lock. What a potentially unsafe call returns before it does anything, one that may wait for the
// device: cudaSuccess if no capture forbids it (cudaThreadExchangeStreamCaptureMode has the rules). Those that
// forbid it are invalid then.
cudaError_t unsafe_in_captures();
// Under the lock. The same of a call that no capture on this thread's device allows, whatever its mode.
cudaError_t conflicts_with_captures();
// Under the lock. Whether this thread has a capture under way.
bool captures();

// Under the lock. Null for the default stream and for what is no stream.
std::shared_ptr<Stream> find(cudaStream_t stream);
// Under the lock. False where something waits for another stream that is not as far.
bool run_until(const std::shared_ptr<Stream>& stream, std::uint64_t target);
// Under the lock. The streams of this thread's device; another one may be another rank's, which is not to be
// waited for.
bool run_all();

// Until `attempt` holds or the device is lost, with the lock free in between. Not under the lock.
template <class Attempt>
cudaError_t wait_until(const Attempt& attempt) {
  for (;;) {
    {
      const std::lock_guard lock(state().mutex);
      if (state().lost) return result(cudaErrorUnknown);
      if (attempt()) return cudaSuccess;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

cudaError_t put_when(cudaStream_t handle, Work work);
cudaError_t put(cudaStream_t handle, std::function<void()> work);

}  // namespace topknot::emulator

// What every call of the run time starts with: the lock, and the failures that a test wants.
#define TOPKNOT_STAND_IN(name)                                  \
  const std::lock_guard lock(topknot::emulator::state().mutex); \
  if (const cudaError_t refusal = topknot::emulator::refused(#name); refusal != cudaSuccess) return refusal
