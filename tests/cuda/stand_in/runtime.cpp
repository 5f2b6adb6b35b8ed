// CUDA's run-time library on the machine of machine.h: memory, streams, events and graphs.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "tests/cuda/stand_in/machine.h"

namespace topknot::stand_in {
namespace {

using Work = std::function<bool()>;  // false: it has to wait for another stream
using Clock = std::chrono::steady_clock;

struct Graph {
  std::vector<Work> work;
  std::set<const void*> open;  // streams that joined the capture and did not come back
  const void* origin = nullptr;
};

struct Stream {
  std::deque<Work> waiting;
  std::uint64_t enqueued = 0, done = 0;
  bool running = false;
  std::shared_ptr<Graph> capture;
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
};

struct Event {
  std::shared_ptr<Stream> stream;  // null: never recorded
  std::uint64_t target = 0;
  std::shared_ptr<Graph> capture;  // recorded into a graph
  std::shared_ptr<Clock::time_point> time = std::make_shared<Clock::time_point>();
};

constexpr std::size_t kGuard = 256;  // bytes before and after each block, watched
constexpr unsigned char kGuardByte = 0xA5;

struct State {
  std::recursive_mutex mutex;
  Machine machine;
  std::map<Stream*, std::shared_ptr<Stream>> streams;
  std::map<char*, std::size_t> memory;                  // device blocks, as handed out
  std::map<std::string, std::pair<int, int>> failures;  // code, calls that still succeed
  std::size_t in_use = 0, kernels = 0;
  bool lost = false;
};

State& state() {
  static auto* instance = new State;  // streams may outlive static destruction
  return *instance;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
thread_local int captures = 0;  // that this thread has begun

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t refused(const char* call) {
  if (state().lost) return result(cudaErrorUnknown);
  return result(static_cast<cudaError_t>(injected(call)));
}

std::shared_ptr<Stream> find(cudaStream_t stream) {
  const auto at = state().streams.find(reinterpret_cast<Stream*>(stream));
  return at == state().streams.end() ? nullptr : at->second;
}

// False where something waits for another stream that is not as far.
bool run_until(const std::shared_ptr<Stream>& stream, std::uint64_t target) {
  while (stream->done < target && !stream->waiting.empty() && !stream->running) {
    stream->running = true;
    const bool done = stream->waiting.front()();
    stream->running = false;
    if (!done) break;
    stream->waiting.pop_front();
    ++stream->done;
  }
  return stream->done >= target;
}

// The streams of this thread's device; another one may be another rank's, which is not to be waited for.
bool run_all() {
  bool all = true;
  for (const auto& [key, stream] : std::map(state().streams))
    if (stream->device == current_device) all = run_until(stream, stream->enqueued) && all;
  return all;
}

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

cudaError_t put_when(cudaStream_t handle, Work work) {
  const std::lock_guard lock(state().mutex);
  const auto stream = find(handle);
  if (!stream) return result(cudaErrorInvalidResourceHandle);  // the default stream included
  if (stream->capture) {
    stream->capture->work.push_back(std::move(work));
    if (stream.get() != stream->capture->origin) stream->capture->open.insert(stream.get());
    return cudaSuccess;
  }
  stream->waiting.push_back(std::move(work));
  ++stream->enqueued;
  return cudaSuccess;
}

cudaError_t put(cudaStream_t handle, std::function<void()> work) {
  return put_when(handle, [work = std::move(work)] {
    work();
    return true;
  });
}

void check_guards(char* data, std::size_t bytes) {
  for (std::size_t i = 0; i < kGuard; ++i)
    if (static_cast<unsigned char>(data[-1 - static_cast<std::ptrdiff_t>(i)]) != kGuardByte ||
        static_cast<unsigned char>(data[bytes + i]) != kGuardByte) {
      std::fprintf(stderr, "stand-in GPU: memory beside a block of %zu bytes was written to\n", bytes);
      std::abort();
    }
}

}  // namespace

Machine& machine() {
  return state().machine;
}

void reset() {
  const std::lock_guard lock(state().mutex);
  state().machine = {};
  state().failures.clear();
  state().lost = false;
  state().kernels = 0;
  last_error = cudaSuccess;
}

void fail(const std::string& call, int error, int after) {
  const std::lock_guard lock(state().mutex);
  state().failures[call] = {error, after};
}

int injected(const char* call) {
  const std::lock_guard lock(state().mutex);
  const auto at = state().failures.find(call);
  if (at == state().failures.end()) return 0;
  if (at->second.second > 0) return --at->second.second, 0;
  return at->second.first;
}

void lose_device() {
  const std::lock_guard lock(state().mutex);
  state().lost = true;
}

std::size_t bytes_in_use() {
  const std::lock_guard lock(state().mutex);
  return state().in_use;
}

std::size_t kernels_run() {
  const std::lock_guard lock(state().mutex);
  return state().kernels;
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
  put(stream, std::move(work));
}

void enqueue_when(cudaStream_t stream, std::function<bool()> attempt) {
  put_when(stream, std::move(attempt));
}

void drain(cudaStream_t stream) {
  wait_until([&] {
    const auto found = find(stream);
    return !found || run_until(found, found->enqueued);
  });
}

void enqueue_kernel(cudaStream_t stream, dim3 grid, dim3 block, const void*, std::function<void()> body) {
  if (refused("cudaLaunchKernel") != cudaSuccess) return;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  const bool fits = threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x >= 1 && grid.y >= 1 &&
                    grid.z >= 1 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
  if (!fits) {
    result(cudaErrorInvalidConfiguration);
    return;
  }
  put(stream, [grid, block, body = std::move(body)] {
    ++state().kernels;
    run_kernel(grid, block, body);
  });
}

}  // namespace topknot::stand_in

using namespace topknot::stand_in;

#define TOPKNOT_STAND_IN(name)               \
  const std::lock_guard lock(state().mutex); \
  if (const cudaError_t refusal = refused(#name); refusal != cudaSuccess) return refusal

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  TOPKNOT_STAND_IN(cudaGetDeviceCount);
  if (state().machine.driver_too_old) return result(cudaErrorInsufficientDriver);
  if (state().machine.devices == 0) return result(cudaErrorNoDevice);
  *count = state().machine.devices;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  TOPKNOT_STAND_IN(cudaSetDevice);
  if (device < 0 || device >= state().machine.devices) return result(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  TOPKNOT_STAND_IN(cudaGetDeviceProperties);
  if (device < 0 || device >= state().machine.devices) return result(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "stand-in GPU");
  properties->totalGlobalMem = state().machine.memory;
  properties->major = state().machine.major;
  properties->minor = state().machine.minor;
  properties->multiProcessorCount = 4;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  TOPKNOT_STAND_IN(cudaDeviceGetAttribute);
  if (device < 0 || device >= state().machine.devices) return result(cudaErrorInvalidDevice);
  *value = attribute == cudaDevAttrMultiProcessorCount      ? 4
           : attribute == cudaDevAttrComputeCapabilityMajor ? state().machine.major
           : attribute == cudaDevAttrComputeCapabilityMinor ? state().machine.minor
                                                            : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  return *version = state().machine.devices == 0 ? 0 : 13000, cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  {
    TOPKNOT_STAND_IN(cudaDeviceSynchronize);
    if (captures > 0) return result(cudaErrorStreamCaptureUnsupported);
  }
  return wait_until(run_all);
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  if (!state().lost) last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorUnknown:
      return "cudaErrorUnknown";
    default:
      return "another error";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorUnknown:
      return "unknown error";
    default:
      return cudaGetErrorName(error);
  }
}
cudaError_t cudaFuncGetName(const char** name, const void*) {
  return *name = "a kernel", cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  TOPKNOT_STAND_IN(cudaMemGetInfo);
  *total = state().machine.memory;
  *free = *total - std::min(*total, state().in_use);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  TOPKNOT_STAND_IN(cudaMalloc);
  if (captures > 0) return result(cudaErrorStreamCaptureUnsupported);
  if (state().in_use + bytes > state().machine.memory) return result(cudaErrorMemoryAllocation);
  auto* block = static_cast<char*>(std::aligned_alloc(256, (bytes + 2 * kGuard + 255) / 256 * 256));
  std::memset(block, kGuardByte, kGuard);
  std::memset(block + kGuard, 0xFF, bytes);
  std::memset(block + kGuard + bytes, kGuardByte, kGuard);
  *data = block + kGuard;
  state().memory[block + kGuard] = bytes;
  state().in_use += bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (!data) return cudaSuccess;
  {
    TOPKNOT_STAND_IN(cudaFree);
    if (captures > 0) return result(cudaErrorStreamCaptureUnsupported);
  }
  if (const cudaError_t error = wait_until(run_all); error != cudaSuccess) return error;
  const std::lock_guard lock(state().mutex);
  const auto at = state().memory.find(static_cast<char*>(data));
  if (at == state().memory.end()) return result(cudaErrorInvalidValue);
  check_guards(at->first, at->second);
  state().in_use -= at->second;
  std::free(at->first - kGuard);
  state().memory.erase(at);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  TOPKNOT_STAND_IN(cudaHostAlloc);
  *data = std::malloc(bytes);
  return *data ? cudaSuccess : result(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* data) {
  wait_until(run_all);
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
  TOPKNOT_STAND_IN(cudaHostRegister);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void*) {
  return wait_until(run_all);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t s) {
  TOPKNOT_STAND_IN(cudaMemcpyAsync);
  return put(s, [=] { std::memcpy(to, from, bytes); });
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  {
    TOPKNOT_STAND_IN(cudaMemcpy);
    if (captures > 0) return result(cudaErrorStreamCaptureUnsupported);
  }
  const cudaError_t error = wait_until(run_all);
  if (error == cudaSuccess) std::memcpy(to, from, bytes);
  return error;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t s) {
  TOPKNOT_STAND_IN(cudaMemsetAsync);
  return put(s, [=] { std::memset(to, value, bytes); });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* data) {
  TOPKNOT_STAND_IN(cudaLaunchHostFunc);
  return put(s, [=] { fn(data); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  TOPKNOT_STAND_IN(cudaStreamCreateWithPriority);
  auto made = std::make_shared<Stream>();
  made->device = current_device, made->flags = flags, made->priority = priority;
  state().streams[made.get()] = made;
  *stream = reinterpret_cast<cudaStream_t>(made.get());
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const std::lock_guard lock(state().mutex);
  if (const auto stream = find(handle)) {
    run_until(stream, stream->enqueued);
    state().streams.erase(stream.get());
  }
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  std::shared_ptr<Stream> stream;
  {
    TOPKNOT_STAND_IN(cudaStreamSynchronize);
    stream = find(handle);
    if (!stream) return result(cudaErrorInvalidResourceHandle);
    if (stream->capture) return result(cudaErrorStreamCaptureUnsupported);
  }
  return wait_until([&, target = stream->enqueued] { return run_until(stream, target); });
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  TOPKNOT_STAND_IN(cudaStreamQuery);
  const auto stream = find(handle);
  if (!stream) return result(cudaErrorInvalidResourceHandle);
  if (stream->capture) return result(cudaErrorStreamCaptureUnsupported);
  return run_until(stream, stream->enqueued) ? cudaSuccess : result(cudaErrorNotReady);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  TOPKNOT_STAND_IN(cudaEventCreateWithFlags);
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(state().mutex);
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t s) {
  TOPKNOT_STAND_IN(cudaEventRecord);
  auto* event = reinterpret_cast<Event*>(handle);
  const auto stream = find(s);
  if (!stream) return result(cudaErrorInvalidResourceHandle);
  event->stream = stream;
  event->capture = stream->capture;
  if (stream->capture) return cudaSuccess;
  put(s, [time = event->time] { *time = Clock::now(); });
  event->target = stream->enqueued;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t handle, unsigned) {
  TOPKNOT_STAND_IN(cudaStreamWaitEvent);
  const auto* event = reinterpret_cast<const Event*>(handle);
  const auto stream = find(s);
  if (!stream) return result(cudaErrorInvalidResourceHandle);
  if (!event->stream) return cudaSuccess;
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture) return result(cudaErrorStreamCaptureMerge);
    if (!stream->capture) {
      stream->capture = event->capture;
      stream->capture->open.insert(stream.get());
    }
    stream->capture->open.erase(event->stream.get());
    return cudaSuccess;
  }
  if (stream->capture) return result(cudaErrorStreamCaptureIsolation);
  return put_when(s, [other = event->stream, target = event->target] { return run_until(other, target); });
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const auto* event = reinterpret_cast<const Event*>(handle);
  {
    TOPKNOT_STAND_IN(cudaEventSynchronize);
    if (event->capture) return result(cudaErrorCapturedEvent);
    if (!event->stream) return cudaSuccess;
  }
  return wait_until([&] { return run_until(event->stream, event->target); });
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  TOPKNOT_STAND_IN(cudaEventQuery);
  const auto* event = reinterpret_cast<const Event*>(handle);
  if (event->capture) return result(cudaErrorCapturedEvent);
  if (!event->stream || run_until(event->stream, event->target)) return cudaSuccess;
  return result(cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  for (cudaEvent_t event : {from, to})
    if (const cudaError_t error = cudaEventSynchronize(event); error != cudaSuccess) return error;
  TOPKNOT_STAND_IN(cudaEventElapsedTime);
  const auto &a = *reinterpret_cast<Event*>(from)->time, &b = *reinterpret_cast<Event*>(to)->time;
  *ms = std::chrono::duration<float, std::milli>(b - a).count();
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  TOPKNOT_STAND_IN(cudaStreamBeginCapture);
  const auto stream = find(s);
  if (!stream || stream->capture) return result(cudaErrorIllegalState);
  stream->capture = std::make_shared<Graph>();
  stream->capture->origin = stream.get();
  ++captures;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(state().mutex);
  const auto stream = find(s);
  *status = stream && stream->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  TOPKNOT_STAND_IN(cudaStreamEndCapture);
  const auto stream = find(s);
  *graph = nullptr;
  if (!stream || !stream->capture || stream->capture->origin != stream.get())
    return result(cudaErrorIllegalState);
  const auto capture = stream->capture;
  for (const auto& [key, other] : state().streams)
    if (other->capture == capture) other->capture = nullptr;
  --captures;
  if (!capture->open.empty()) return result(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(capture));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  TOPKNOT_STAND_IN(cudaGraphInstantiate);
  *executable = reinterpret_cast<cudaGraphExec_t>(
      new std::shared_ptr<Graph>(*reinterpret_cast<std::shared_ptr<Graph>*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t s) {
  TOPKNOT_STAND_IN(cudaGraphLaunch);
  return put_when(
      s, [graph = *reinterpret_cast<std::shared_ptr<Graph>*>(executable), at = std::size_t{0}]() mutable {
        while (at < graph->work.size() && graph->work[at]()) ++at;
        return at == graph->work.size();
      });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return delete reinterpret_cast<std::shared_ptr<Graph>*>(graph), cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return delete reinterpret_cast<std::shared_ptr<Graph>*>(executable), cudaSuccess;
}

}  // extern "C"
