// CUDA's run-time library on the machine of machine.h: streams and events.
#include "tests/emulator/machine_state.h"

using namespace topknot::emulator;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  TOPKNOT_STAND_IN(cudaStreamCreateWithPriority);
  auto made = std::make_shared<Stream>();
  made->device = this_thread().device;
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
    if (stream->capture) return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
    if (const cudaError_t error = unsafe_in_captures(); error != cudaSuccess) return error;
  }
  return wait_until([&, target = stream->enqueued] { return run_until(stream, target); });
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  TOPKNOT_STAND_IN(cudaStreamQuery);
  const auto stream = find(handle);
  if (!stream) return result(cudaErrorInvalidResourceHandle);
  if (stream->capture) return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
  if (const cudaError_t error = unsafe_in_captures(); error != cudaSuccess) return error;
  return run_until(stream, stream->enqueued) ? cudaSuccess : result(cudaErrorNotReady);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  TOPKNOT_STAND_IN(cudaEventCreateWithFlags);
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
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
  if (stream->capture && stream->capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
  event->stream = stream;
  event->capture = stream->capture;
  if (stream->capture) {
    Graph& graph = *stream->capture;
    event->target = graph.branches[graph.branch_of(stream.get())].nodes.size();
    return cudaSuccess;
  }
  put(s, [time = event->time] { *time = Clock::now() + state().passed; });
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
    if (event->capture->ended) return result(cudaErrorCapturedEvent);
    if (event->capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
    if (stream->capture && stream->capture != event->capture)
      return invalidate(*stream->capture, invalidate(*event->capture, cudaErrorStreamCaptureMerge));
    stream->capture = event->capture;
    Graph& graph = *event->capture;
    const std::size_t mine = graph.branch_of(stream.get()), theirs = graph.branch_of(event->stream.get());
    graph.branches[mine].nodes.push_back({{}, theirs, std::size_t(event->target)});
    return cudaSuccess;
  }
  if (stream->capture) return invalidate(*stream->capture, cudaErrorStreamCaptureIsolation);
  return put_when(s, [other = event->stream, target = event->target] { return run_until(other, target); });
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const auto* event = reinterpret_cast<const Event*>(handle);
  {
    TOPKNOT_STAND_IN(cudaEventSynchronize);
    if (event->capture) return invalidate(*event->capture, cudaErrorCapturedEvent);
    if (const cudaError_t error = unsafe_in_captures(); error != cudaSuccess) return error;
    if (!event->stream) return cudaSuccess;
  }
  return wait_until([&] { return run_until(event->stream, event->target); });
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  TOPKNOT_STAND_IN(cudaEventQuery);
  const auto* event = reinterpret_cast<const Event*>(handle);
  if (event->capture) return invalidate(*event->capture, cudaErrorCapturedEvent);
  if (const cudaError_t error = unsafe_in_captures(); error != cudaSuccess) return error;
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

}  // extern "C"
