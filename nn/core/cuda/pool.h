#pragma once
// GPU memory kept for reuse, for one stream: a block that was released is handed out again to later work of
// the same stream, in whose order that is safe. Sizes are rounded up, so that the blocks of a step fit the
// next. And graphs, which keep the memory that their kernels write to.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nn/core/cuda/check.h"

namespace topknot::cuda {

class Pool {
 public:
  explicit Pool(int device);
  ~Pool();

  // 512-byte aligned. If memory is short, gives all ranks' cached blocks back first; else throws OutOfMemory.
  void* allocate(std::size_t bytes);
  void release(void* data) noexcept;
  // Gives free blocks back. Waits for the GPU.
  void release_cached() noexcept;

  // While `graph` is set (null: none), memory comes from what that graph has, from what is cached and last
  // from the GPU, and goes back to the graph: kernels that were recorded write to it at each replay, so it
  // has no other user. Where the GPU has no more during a capture, OutOfMemory names train.graphs.
  void use(class GraphMemory* graph);

  // Bytes handed out.
  std::size_t in_use() const {
    const std::lock_guard lock(mutex_);
    return in_use_;
  }
  // Bytes taken from the GPU.
  std::size_t reserved() const {
    const std::lock_guard lock(mutex_);
    return reserved_;
  }

  static std::size_t rounded(std::size_t bytes);

 private:
  using FreeBlocks = std::map<std::size_t, std::vector<void*>>;  // by size
  friend class GraphMemory;
  struct Block {
    std::size_t bytes;
    GraphMemory* graph;  // that it goes back to; null: the common ones
  };
  static std::size_t best_fit(const FreeBlocks& blocks, std::size_t size);
  static void* take_cached(FreeBlocks& blocks, std::size_t size);
  void* cached_or_new(std::size_t size);  // null if memory is short, and no graph is being recorded
  void* take(std::size_t bytes);          // likewise
  void release_cached_of_all() const noexcept;
  [[noreturn]] void fail(std::size_t size) const;
  void* take_in_capture(std::size_t bytes);
  const int device_;
  mutable std::mutex mutex_;
  FreeBlocks free_;
  std::unordered_map<void*, Block> handed_out_;
  GraphMemory* graph_ = nullptr;
  std::size_t in_use_ = 0, reserved_ = 0;
};

// The memory that graphs of one stream use, which run one after the other: they share it. Must outlive the
// graphs and whatever was allocated for them.
class GraphMemory {
 public:
  explicit GraphMemory(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  ~GraphMemory();  // gives it back to the pool
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;
  Pool& pool() { return *pool_; }

 private:
  friend class Pool;
  std::shared_ptr<Pool> pool_;
  Pool::FreeBlocks free_;
};

// Work on a stream as a CUDA graph: recorded once, then started again with one call.
class Graph {
 public:
  Graph() = default;
  // Records what `work` puts on the stream, and on streams that join it by events; nothing runs yet. `work`
  // may not wait for the GPU; what memory it uses stays with `memory`. Rethrows what it throws.
  Graph(cudaStream_t stream, GraphMemory& memory, const std::function<void()>& work);
  ~Graph() {
    if (executable_) cudaGraphExecDestroy(executable_);
  }
  Graph(Graph&& other) noexcept
      : executable_(std::exchange(other.executable_, nullptr)), nodes_(other.nodes_) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(executable_, other.executable_);
    std::swap(nodes_, other.nodes_);
    return *this;
  }

  explicit operator bool() const { return executable_ != nullptr; }
  void launch(cudaStream_t stream) const { TOPKNOT_CUDA(cudaGraphLaunch(executable_, stream)); }
  std::size_t nodes() const { return nodes_; }  // kernels, copies and what else was recorded

 private:
  cudaGraphExec_t executable_ = nullptr;
  std::size_t nodes_ = 0;
};

}  // namespace topknot::cuda
