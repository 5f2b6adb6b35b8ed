// CUDA's run-time library on the machine of machine.h: graphs, and their capture.
#include <algorithm>

#include "tests/emulator/machine_state.h"

using namespace topknot::emulator;

namespace topknot::emulator {

std::size_t Graph::branch_of(const void* stream) {
  std::size_t at = 0;
  while (at < branches.size() && branches[at].stream != stream) ++at;
  if (at == branches.size()) branches.push_back({stream, {}});
  return at;
}

bool Graph::joined() const {
  std::vector<std::size_t> seen(branches.size(), 0), waited(branches.size(), 0);  // nodes
  waited[0] = branches[0].nodes.size();
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t b = 0; b < branches.size(); ++b)
      for (; seen[b] < waited[b]; ++seen[b]) {
        const Node& node = branches[b].nodes[seen[b]];
        if (!node.work) waited[node.branch] = std::max(waited[node.branch], node.target), changed = true;
      }
  }
  for (std::size_t b = 1; b < branches.size(); ++b) {
    std::size_t last = branches[b].nodes.size();
    while (last > 1 && !branches[b].nodes[last - 1].work) --last;  // waits at the end do nothing
    if (waited[b] < last) return false;
  }
  return true;
}

}  // namespace topknot::emulator

namespace {

// A graph's way through its nodes. What waits for nothing but its own branch's past may run in any order on a
// GPU; here branches other than the first run as late as they may, or, on a reversed machine, as early.
class Replay {
 public:
  explicit Replay(std::shared_ptr<Graph> graph) : graph_(std::move(graph)), at_(graph_->branches.size()) {}

  bool operator()() {
    bool all = true;
    for (std::size_t i = 0; i < at_.size(); ++i) {
      const std::size_t b = machine().reverse ? at_.size() - 1 - i : i;
      all = advance(b, graph_->branches[b].nodes.size()) && all;
    }
    return all;
  }

 private:
  bool advance(std::size_t branch, std::size_t target) {
    for (std::size_t& at = at_[branch]; at < target; ++at) {
      const Graph::Node& node = graph_->branches[branch].nodes[at];
      if (!(node.work ? node.work() : advance(node.branch, node.target))) return false;
    }
    return true;
  }

  std::shared_ptr<Graph> graph_;
  std::vector<std::size_t> at_;  // nodes done, by branch
};

std::size_t count_nodes(const Graph& graph) {
  std::ptrdiff_t count = 0;
  for (const Graph::Branch& branch : graph.branches)
    count += std::count_if(branch.nodes.begin(), branch.nodes.end(),
                           [](const Graph::Node& node) { return bool(node.work); });
  return std::size_t(count);
}

}  // namespace

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, this_thread().mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  TOPKNOT_STAND_IN(cudaStreamBeginCapture);
  const auto stream = find(s);
  if (!stream || stream->capture) return result(cudaErrorIllegalState);
  stream->capture = std::make_shared<Graph>();
  stream->capture->branch_of(stream.get());
  stream->capture->mode = mode;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  const std::lock_guard lock(state().mutex);
  const auto stream = find(s);
  *status = !stream || !stream->capture ? cudaStreamCaptureStatusNone
            : stream->capture->invalid  ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  TOPKNOT_STAND_IN(cudaStreamEndCapture);
  const auto stream = find(s);
  *graph = nullptr;
  if (!stream || !stream->capture || stream->capture->branches[0].stream != stream.get())
    return result(cudaErrorIllegalState);
  const auto capture = stream->capture;
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return invalidate(*capture, cudaErrorStreamCaptureWrongThread);
  for (const auto& [key, other] : state().streams)
    if (other->capture == capture) other->capture = nullptr;
  capture->ended = true;
  if (capture->invalid) return result(cudaErrorStreamCaptureInvalidated);
  if (!capture->joined()) return result(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(capture));
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  TOPKNOT_STAND_IN(cudaGraphGetNodes);
  if (nodes) return result(cudaErrorNotSupported);  // only how many
  *count = count_nodes(**reinterpret_cast<std::shared_ptr<Graph>*>(graph));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  TOPKNOT_STAND_IN(cudaGraphInstantiate);
  const auto& captured = *reinterpret_cast<std::shared_ptr<Graph>*>(graph);
  *executable = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Graph>(captured));
  state().counts.graph_nodes = count_nodes(*captured);
  state().counts.most_graphs = std::max(state().counts.most_graphs, ++state().counts.graphs);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t s) {
  TOPKNOT_STAND_IN(cudaGraphLaunch);
  return put_when(s, Replay(*reinterpret_cast<std::shared_ptr<Graph>*>(executable)));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return delete reinterpret_cast<std::shared_ptr<Graph>*>(graph), cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  const std::lock_guard lock(state().mutex);
  --state().counts.graphs;
  return delete reinterpret_cast<std::shared_ptr<Graph>*>(executable), cudaSuccess;
}

}  // extern "C"
