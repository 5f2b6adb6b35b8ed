#include "nn/core/cuda/graph.h"

#include <utility>

#include "nn/core/cuda/check.h"

namespace topknot::cuda {

Graph::Graph(cudaStream_t stream, GraphMemory& memory, const std::function<void()>& work) {
  // Of this thread only: other ranks of the process go on meanwhile.
  TOPKNOT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  memory.pool().use(&memory);
  try {
    work();
    memory.pool().use(nullptr);
  } catch (...) {
    memory.pool().use(nullptr);
    cudaStreamEndCapture(stream, &graph);  // or the stream is of no more use
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  TOPKNOT_CUDA(cudaStreamEndCapture(stream, &graph));
  // Each kernel with the priority of the stream that it was recorded on: collectives come before computation.
  const cudaError_t status =
      cudaGraphInstantiate(&executable_, graph, cudaGraphInstantiateFlagUseNodePriority);
  cudaGraphDestroy(graph);
  check_cuda(status, "cudaGraphInstantiate", __FILE__, __LINE__);
}

Graph::~Graph() {
  if (executable_) cudaGraphExecDestroy(executable_);
}

Graph::Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(executable_, other.executable_);
  return *this;
}

void Graph::launch(cudaStream_t stream) const {
  TOPKNOT_CUDA(cudaGraphLaunch(executable_, stream));
}

}  // namespace topknot::cuda
