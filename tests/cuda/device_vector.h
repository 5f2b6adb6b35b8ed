#pragma once
// GPU memory that tests write and read, graphs, and the bytes of a state.
#include "compress/state.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/pool.h"
#include "tests/compress/simulated_ranks.h"  // same_bits()

namespace topknot::testing {

template <class T>
std::vector<T> to_host(const T* device, std::size_t n) {
  std::vector<T> values(n);
  cuda::Context& context = cuda::Context::current();
  if (n > 0)
    TOPKNOT_CUDA(
        cudaMemcpyAsync(values.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost, context.stream()));
  context.synchronize();
  return values;
}

template <class T>
void to_device(T* device, const std::vector<T>& values) {
  cuda::Context& context = cuda::Context::current();
  if (!values.empty())
    TOPKNOT_CUDA(cudaMemcpyAsync(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice,
                                 context.stream()));
  context.synchronize();
}

// Elements in GPU memory.
template <class T>
class DeviceVector {
 public:
  DeviceVector() = default;
  explicit DeviceVector(std::size_t n) : memory_(n) {}
  explicit DeviceVector(const std::vector<T>& values) : memory_(values.size()) { set(values); }
  T* data() const { return memory_.data(); }
  std::size_t size() const { return memory_.size(); }
  void set(const std::vector<T>& values) {
    to_device(data(), values);
  }  // as many as there is room for, or fewer
  std::vector<T> host() const { return to_host(static_cast<const T*>(data()), size()); }

 private:
  cuda::DeviceArray<T> memory_;
};

// What `work` puts on the stream, as a graph with memory of its own; nothing runs before launch().
class CapturedGraph {
 public:
  CapturedGraph(cudaStream_t stream, const std::function<void()>& work)
      : memory_(cuda::Context::current().pool()), graph_(stream, memory_, work) {}
  void launch(cudaStream_t stream) { graph_.launch(stream); }

 private:
  cuda::GraphMemory memory_;
  cuda::Graph graph_;
};

template <class Saves>
std::vector<std::byte> saved(const Saves& one) {
  StateWriter writer;
  one.save(writer);
  return writer.take();
}

}  // namespace topknot::testing
