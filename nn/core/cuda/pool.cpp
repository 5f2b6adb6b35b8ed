#include "nn/core/cuda/pool.h"

#include <cstdio>

#include "nn/core/cuda/context.h"

namespace topknot::cuda {
namespace {

std::string mebibytes(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

// The pools of this process: what one rank keeps, another one on the same GPU may need.
struct Pools {
  std::mutex mutex;  // taken before that of a pool
  std::vector<Pool*> all;
};
Pools& pools() {
  static auto* instance = new Pools;  // never destroyed: the last pool may go after main()
  return *instance;
}

// Fills a block with NaNs, as nn/core/cpu_memory.cpp does, in the stream's order.
void poison([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#ifdef TOPKNOT_POISON
  if (const Context* context = Context::current_or_null())
    cudaMemsetAsync(data, 0xFF, bytes, context->stream());
#endif
}

}  // namespace

Pool::Pool(int device) : device_(device) {
  const std::lock_guard lock(pools().mutex);
  pools().all.push_back(this);
}

Pool::~Pool() {
  {
    const std::lock_guard lock(pools().mutex);
    std::erase(pools().all, this);
  }
  release_cached();
}

void Pool::release_cached_of_all() const noexcept {
  const std::lock_guard lock(pools().mutex);
  for (Pool* pool : pools().all)
    if (pool->device_ == device_) pool->release_cached();
}

std::size_t Pool::rounded(std::size_t bytes) {
  const std::size_t unit = bytes < (std::size_t{1} << 20) ? 512 : std::size_t{128} << 10;
  return bytes == 0 ? unit : (bytes + unit - 1) / unit * unit;
}

// A block up to an eighth larger does: sizes that differ a little from step to step share. 0: there is none.
std::size_t Pool::best_fit(const FreeBlocks& blocks, std::size_t size) {
  const auto found = blocks.lower_bound(size);
  return found == blocks.end() || found->first > size + size / 8 ? 0 : found->first;
}

void* Pool::take_cached(FreeBlocks& blocks, std::size_t size) {
  const auto found = blocks.find(size);
  void* data = found->second.back();
  found->second.pop_back();
  if (found->second.empty()) blocks.erase(found);
  return data;
}

void* Pool::allocate(std::size_t bytes) {
  const std::size_t size = rounded(bytes);
  if (void* data = cached_or_new(size)) return data;
  release_cached_of_all();
  if (void* data = cached_or_new(size)) return data;
  fail(size);
}

void* Pool::cached_or_new(std::size_t size) {
  const std::lock_guard lock(mutex_);
  // The tightest of both, as without a graph: what a step could do with before then suffices for its graph.
  const std::size_t own = graph_ ? best_fit(graph_->free_, size) : 0, common = best_fit(free_, size);
  const bool of_graph = own != 0 && (common == 0 || own <= common);
  const std::size_t fit = of_graph ? own : common, got = fit != 0 ? fit : size;
  void* data = nullptr;
  if (fit != 0) {
    data = take_cached(of_graph ? graph_->free_ : free_, fit);
    if (!graph_) poison(data, fit);  // a capture would record it
  } else {
    data = graph_ ? take_in_capture(size) : take(size);
    if (!data) return nullptr;
    reserved_ += size;
  }
  handed_out_[data] = {got, graph_};
  in_use_ += got;
  return data;
}

void Pool::use(GraphMemory* graph) {
  const std::lock_guard lock(mutex_);
  graph_ = graph;
}

GraphMemory::~GraphMemory() {
  const std::lock_guard lock(pool_->mutex_);
  for (auto& [bytes, list] : free_)
    for (void* block : list) pool_->free_[bytes].push_back(block);
  for (auto& [data, block] : pool_->handed_out_)
    if (block.graph == this) block.graph = nullptr;
}

void* Pool::take_in_capture(std::size_t size) {
  // No call that a capture records: it is let through once. Cached blocks stay: giving them back would wait.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  TOPKNOT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, size);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (status == cudaSuccess) return data;
  if (status != cudaErrorMemoryAllocation) TOPKNOT_CUDA(status);
  cudaGetLastError();
  throw OutOfMemory("a graph is being recorded and needs " + mebibytes(size) +
                    " of GPU memory that is not there; set train.graphs=false, or lower the batch size");
}

void* Pool::take(std::size_t size) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, size);
  if (status == cudaSuccess) return data;
  if (status != cudaErrorMemoryAllocation) TOPKNOT_CUDA(status);
  cudaGetLastError();
  return nullptr;
}

void Pool::fail(std::size_t size) const {
  std::size_t left = 0, total = 0;
  if (cudaMemGetInfo(&left, &total) != cudaSuccess) left = total = 0;
  const Context* context = Context::current_or_null();
  const std::string rank = context ? " (rank " + std::to_string(context->options().rank) + ")" : "";
  throw OutOfMemory("GPU " + std::to_string(device_) + " is out of memory" + rank + ": " + mebibytes(size) +
                    " asked for, " + mebibytes(in_use()) + " in use here, " + mebibytes(left) + " of " +
                    mebibytes(total) +
                    " free; lower the batch size, or the number of ranks that share the GPU");
}

void Pool::release(void* data) noexcept {
  const std::lock_guard lock(mutex_);
  const auto at = handed_out_.find(data);
  if (at == handed_out_.end()) return;
  const auto [bytes, graph] = at->second;
  in_use_ -= bytes;
  (graph ? graph->free_ : free_)[bytes].push_back(data);
  handed_out_.erase(at);
}

void Pool::release_cached() noexcept {
  const std::lock_guard lock(mutex_);
  for (auto& [bytes, list] : free_)
    for (void* block : list) {
      cudaFree(block);
      reserved_ -= bytes;
    }
  free_.clear();
}

Graph::Graph(cudaStream_t stream, GraphMemory& memory, const std::function<void()>& work) {
  // Captures this thread only: other ranks of the process go on meanwhile.
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
  cudaError_t status = cudaGraphGetNodes(graph, nullptr, &nodes_);
  // Each kernel with the priority of the stream that it was recorded on: collectives come before computation.
  if (status == cudaSuccess)
    status = cudaGraphInstantiate(&executable_, graph, cudaGraphInstantiateFlagUseNodePriority);
  cudaGraphDestroy(graph);
  check_cuda(status, "cudaGraphGetNodes, cudaGraphInstantiate", __FILE__, __LINE__);
}

}  // namespace topknot::cuda
