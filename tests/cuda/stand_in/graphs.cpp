// CUDA's run-time library on the machine of machine.h: graphs, and their capture.
#include "tests/cuda/stand_in/machine_state.h"

using namespace topknot::stand_in;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, this_thread().mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  TOPKNOT_STAND_IN(cudaStreamBeginCapture);
  const auto stream = find(s);
  if (!stream || stream->capture) return result(cudaErrorIllegalState);
  stream->capture = std::make_shared<Graph>();
  stream->capture->origin = stream.get();
  ++this_thread().captures;
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
  capture->ended = true;
  --this_thread().captures;
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
