#pragma once
// A rank's share of a GPU: its streams, library handles, memory pool and scratch memory. One per rank, also
// where several ranks of a process share a card. Everything of a rank runs on stream(), in order; memory that
// a tensor gives back is used again by later work of the same rank without waiting.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <typeindex>
#include <utility>
#include <vector>

#include "nn/core/cuda/check.h"
#include "nn/core/device.h"

struct cublasContext;  // cublasHandle_t and cudnnHandle_t point to these
struct cudnnContext;

namespace topknot {
class AlgorithmCache;
}

namespace topknot::cuda {

enum class Precision {
  fp32,  // plain fp32 arithmetic everywhere
  tf32,  // fp32 memory; convolutions and matrix products with 10 bits of mantissa
  bf16,  // activations and their products in bfloat16; weights, gradients, residuals and sums in fp32
};

struct ContextOptions {
  int device = 0;  // index of the GPU
  int rank = 0;    // for messages
  Precision precision = Precision::fp32;
  bool deterministic = false;  // train.deterministic: only algorithms with the same bits in every run
  bool shared = false;         // kernels of other ranks or of collectives run during stream()'s on this GPU
  std::string algorithm_cache = {};  // folder where timed choices are kept for later processes; "": none
  bool early_launch = false;         // of kernels (await_previous()); before compute capability 9.0: never
  bool conv_plans = false;           // nn/ops/cuda/cudnn_graph.h, where algorithms are timed
};

class Pool;

class Context {
 public:
  // Throws UserError if the GPU cannot be used, CudaError if a call fails.
  explicit Context(const ContextOptions& options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // The context that this thread works in; throws Error if there is none.
  static Context& current();
  static Context* current_or_null();

  // Makes a context this thread's current one for as long as it lives, and its GPU the thread's device.
  class Use {
   public:
    explicit Use(Context& context);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Context* before_;
  };

  const ContextOptions& options() const { return options_; }
  bool early_launches() const { return options_.early_launch; }
  void end_early_launches() { options_.early_launch = false; }
  Device device() const { return {DeviceKind::cuda, options_.device}; }
  DType activation_type() const { return options_.precision == Precision::bf16 ? DType::bf16 : DType::f32; }

  cudaStream_t stream() const { return stream_; }                // compute
  cudaStream_t communication() const { return communication_; }  // collectives; of the highest priority

  // In libraries.cpp, which libtopknot lacks:
  cublasContext* cublas();  // on stream(), in the options' precision
  cudnnContext* cudnn();    // on stream()
  // The file of options().algorithm_cache for this GPU model, CUDA driver and cuDNN; read at the first call.
  AlgorithmCache& algorithm_cache();

  // Scratch memory for the next call on stream(), `bytes` or more; valid until the next workspace().
  void* workspace(std::size_t bytes);

  // Memory on this rank's GPU in the order of stream(). Contents are undefined. Throws OutOfMemory.
  void* allocate(std::size_t bytes);
  std::shared_ptr<Pool> pool() const { return pool_; }

  // An op's cache for this rank (plans by shape, choices that were timed): one T, made at the first call,
  // destroyed with the context, the latest first, so it may use older ones (cuDNN's handle).
  template <class T>
  T& keep() {
    for (const auto& [type, kept] : kept_)
      if (type == typeid(T)) return *static_cast<T*>(kept.get());
    return *static_cast<T*>(kept_.emplace_back(typeid(T), std::make_shared<T>()).second.get());
  }

  // Waits for everything on both streams; throws CudaError for what failed there.
  void synchronize() {
    TOPKNOT_CUDA(cudaStreamSynchronize(stream_));
    TOPKNOT_CUDA(cudaStreamSynchronize(communication_));
  }

 private:
  ContextOptions options_;
  cudaStream_t stream_ = nullptr, communication_ = nullptr;
  void* workspace_ = nullptr;
  std::size_t workspace_bytes_ = 0;
  std::vector<void*> old_workspaces_;  // graphs may use them
  std::shared_ptr<Pool> pool_;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> kept_;
};

void release_to_pool(Pool& pool, void* data) noexcept;

// Memory of the GPU that frees itself, in the order of the current context's stream.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t size)
      : data_(size == 0 ? nullptr : static_cast<T*>(Context::current().allocate(size * sizeof(T))),
              [pool = Context::current().pool()](T* data) {
                if (data) release_to_pool(*pool, data);
              }),
        size_(size) {}
  T* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::size_t bytes() const { return size_ * sizeof(T); }

 private:
  std::shared_ptr<T> data_;
  std::size_t size_ = 0;
};

// The same values in GPU memory; waits for the copy.
template <class T>
DeviceArray<T> on_device(const std::vector<T>& values) {
  DeviceArray<T> array(values.size());
  const cudaStream_t stream = Context::current().stream();
  if (!values.empty())
    TOPKNOT_CUDA(cudaMemcpyAsync(array.data(), values.data(), array.bytes(), cudaMemcpyHostToDevice, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  return array;
}

// `size` values of GPU memory, after everything that was put on the context's streams; waits for the copy.
template <class T>
std::vector<T> on_host(const T* data, std::size_t size) {
  std::vector<T> values(size);
  Context& context = Context::current();
  context.synchronize();
  if (size > 0)
    TOPKNOT_CUDA(
        cudaMemcpyAsync(values.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost, context.stream()));
  TOPKNOT_CUDA(cudaStreamSynchronize(context.stream()));
  return values;
}

// Page-locked host memory, for asynchronous copies.
class PinnedMemory {
 public:
  explicit PinnedMemory(std::size_t bytes) : size_(bytes) {
    void* data = nullptr;
    TOPKNOT_CUDA(cudaHostAlloc(&data, bytes == 0 ? 1 : bytes, cudaHostAllocPortable));
    data_ = static_cast<std::byte*>(data);
  }
  ~PinnedMemory() { cudaFreeHost(data_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// A stream in addition to the context's two, of the current device.
class Stream {
 public:
  Stream() { TOPKNOT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Whether what is put on the stream is recorded in a graph.
inline bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  TOPKNOT_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// An event without timing (with_time: with), of the current device.
class Event {
 public:
  explicit Event(bool with_time = false) {
    TOPKNOT_CUDA(cudaEventCreateWithFlags(&event_, with_time ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~Event() {
    if (event_) cudaEventDestroy(event_);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { TOPKNOT_CUDA(cudaEventRecord(event_, stream)); }
  // Lets the stream wait, not the host.
  void wait(cudaStream_t stream) const { TOPKNOT_CUDA(cudaStreamWaitEvent(stream, event_, 0)); }
  void synchronize() const { TOPKNOT_CUDA(cudaEventSynchronize(event_)); }  // the host waits
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};
float milliseconds_between(const Event& from, const Event& to);

// *at = the GPU's clock in nanoseconds, when the stream comes here, in steps of up to a microsecond.
void write_time(cudaStream_t stream, std::uint64_t* at);
// The stream goes on after so many nanoseconds, in which the host puts more on it.
void hold(cudaStream_t stream, std::uint64_t nanoseconds);
// Whether the current GPU runs kernels that were compiled for compute capability 9.0 or more: else, on an older GPU
// or by the code of one, await_previous() does not wait.
bool kernels_await();
// DeviceBackend::add on a stream. bfloat16 numbers are added as floats and rounded once.
void add(cudaStream_t stream, DType type, const void* a, const void* b, void* out, std::size_t n);

// "" if a GPU can be used; else why not, and what to do.
std::string problem();

}  // namespace topknot::cuda
