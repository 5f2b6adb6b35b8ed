#pragma once
// Work on a stream as a CUDA graph: recorded once, then started again with one call.

#include <cuda_runtime_api.h>

#include <functional>

#include "nn/core/cuda/pool.h"

namespace topknot::cuda {

class Graph {
 public:
  Graph() = default;
  // Records what `work` puts on the stream, and on streams that join it by events; nothing runs yet. `work` may
  // not wait for the GPU; what memory it uses stays with `memory`.
  // Rethrows what it throws.
  Graph(cudaStream_t stream, GraphMemory& memory, const std::function<void()>& work);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  explicit operator bool() const { return executable_ != nullptr; }
  void launch(cudaStream_t stream) const;

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace topknot::cuda
