// The machine itself: its streams' work, and what tests want of it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/emulator/machine_state.h"
#include "tests/emulator/races.h"

namespace topknot::emulator {

State& state() {
  static auto* instance = new State;  // streams may outlive static destruction
  return *instance;
}

ThisThread& this_thread() {
  thread_local ThisThread mine;
  return mine;
}

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) this_thread().last_error = error;
  return error;
}

cudaError_t refused(const char* call) {
  if (state().lost) return result(cudaErrorUnknown);
  return result(static_cast<cudaError_t>(injected(call)));
}

cudaError_t invalidate(Graph& capture, cudaError_t error) {
  capture.invalid = true;
  return result(error);
}

namespace {

// Spoils the captures that `forbids` the call.
template <class Forbids>
cudaError_t unless_captured(const Forbids& forbids) {
  cudaError_t error = cudaSuccess;
  for (const auto& [key, stream] : state().streams)
    if (stream->capture && forbids(*stream))
      error = invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
  return error;
}
bool of_this_thread(const Graph& capture) {
  return capture.thread == std::this_thread::get_id();
}

}  // namespace

cudaError_t unsafe_in_captures() {
  const cudaStreamCaptureMode mode = this_thread().mode;
  return unless_captured([&](const Stream& stream) {
    const Graph& capture = *stream.capture;
    if (mode == cudaStreamCaptureModeRelaxed) return false;
    if (of_this_thread(capture)) return capture.mode != cudaStreamCaptureModeRelaxed;
    return mode == cudaStreamCaptureModeGlobal && capture.mode == cudaStreamCaptureModeGlobal;
  });
}

cudaError_t conflicts_with_captures() {
  return unless_captured([](const Stream& stream) { return stream.device == this_thread().device; });
}

bool captures() {
  return std::any_of(state().streams.begin(), state().streams.end(), [](const auto& entry) {
    return entry.second->capture && of_this_thread(*entry.second->capture);
  });
}

std::shared_ptr<Stream> find(cudaStream_t stream) {
  const auto at = state().streams.find(reinterpret_cast<Stream*>(stream));
  return at == state().streams.end() ? nullptr : at->second;
}

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

bool run_all() {
  bool all = true;
  for (const auto& [key, stream] : std::map(state().streams))
    if (stream->device == this_thread().device) all = run_until(stream, stream->enqueued) && all;
  return all;
}

cudaError_t put_when(cudaStream_t handle, Work work) {
  const std::lock_guard lock(state().mutex);
  const auto stream = find(handle);
  if (!stream) return result(cudaErrorInvalidResourceHandle);  // the default stream included
  if (stream->capture) {
    Graph& graph = *stream->capture;
    if (graph.invalid) return result(cudaErrorStreamCaptureInvalidated);
    graph.branches[graph.branch_of(stream.get())].nodes.push_back({std::move(work)});
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

Machine& machine() {
  return state().machine;
}

void reset() {
  const std::lock_guard lock(state().mutex);
  state().machine = {};
  state().failures.clear();
  state().lost = false;
  const auto [bytes, graphs] = std::pair(state().counts.bytes_in_use, state().counts.graphs);
  state().counts = {
      .bytes_in_use = bytes, .most_bytes_in_use = bytes, .graphs = graphs, .most_graphs = graphs};
  this_thread().last_error = cudaSuccess;
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

Counts counts() {
  const std::lock_guard lock(state().mutex);
  return state().counts;
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

namespace {

// The programming guide has early launches from compute capability 9.0 on, and says nothing of older ones. In a
// capture a driver was reported to refuse what it takes outside of one (sglang#18596).
bool early_refused(cudaStream_t stream) {
  const std::lock_guard lock(state().mutex);
  if (state().machine.major < 9) return result(cudaErrorNotSupported) != cudaSuccess;
  const auto found = find(stream);
  if (!found || !found->capture || refused("an early launch in a graph") == cudaSuccess) return false;
  found->capture->invalid = true;
  return true;
}

}  // namespace

void enqueue_kernel(cudaStream_t stream, dim3 grid, dim3 block, const void* kernel, bool early,
                    std::function<void()> body) {
  if (refused("cudaLaunchKernel") != cudaSuccess) return;
  if (early && early_refused(stream)) return;
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  const bool fits = threads >= 1 && threads <= 1024 && block.z <= 64 && grid.x >= 1 && grid.y >= 1 &&
                    grid.z >= 1 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
  if (!fits) {
    result(cudaErrorInvalidConfiguration);
    return;
  }
  const auto thread = [kernel, body = std::move(body)] {
    body();
    if (has_awaited()) return;
    std::fprintf(stderr, "emulated GPU: a thread has ended without await_previous()\n%s",
                 races::place_of(kernel).c_str());
    std::abort();
  };
  put(stream, [kernel, grid, block, early, thread] {
    ++state().counts.kernels;
    if (early) ++state().counts.early_kernels;
    run_kernel(kernel, grid, block, thread);
  });
}

}  // namespace topknot::emulator
