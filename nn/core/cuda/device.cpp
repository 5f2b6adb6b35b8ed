// GPU memory for tensors: blocks of the current context's pool, which a tensor may outlive.
#include <mutex>
#include <unordered_map>

#include "nn/core/cuda/context.h"
#include "nn/core/cuda/device_kernels.h"
#include "nn/core/cuda/pool.h"
#include "nn/core/device.h"

namespace topknot {
namespace {

using cuda::Context;

class CudaBackend final : public DeviceBackend {
 public:
  float* allocate(std::size_t floats) override {
    const std::shared_ptr<cuda::Pool> pool = Context::current().pool();
    void* data = pool->allocate(floats * sizeof(float));
    const std::lock_guard lock(mutex_);
    owners_[data] = pool;
    return static_cast<float*>(data);
  }

  void release(float* data, std::size_t) override {
    std::shared_ptr<cuda::Pool> pool;
    {
      const std::lock_guard lock(mutex_);
      const auto at = owners_.find(data);
      if (at == owners_.end()) return;
      pool = std::move(at->second);
      owners_.erase(at);
    }
    pool->release(data);
  }

  void release_cached() override { Context::current().pool()->release_cached(); }

  void fill_zero(float* data, std::size_t floats) override {
    TOPKNOT_CUDA(cudaMemsetAsync(data, 0, floats * sizeof(float), Context::current().stream()));
  }
  void fill(float* data, std::size_t floats, float value) override {
    cuda::fill_floats(Context::current().stream(), data, floats, value);
  }
  void to_device(float* device, const float* host, std::size_t floats) override {
    Context& context = Context::current();
    TOPKNOT_CUDA(
        cudaMemcpyAsync(device, host, floats * sizeof(float), cudaMemcpyHostToDevice, context.stream()));
    TOPKNOT_CUDA(cudaStreamSynchronize(context.stream()));
  }
  void to_host(float* host, const float* device, std::size_t floats) override {
    Context& context = Context::current();
    TOPKNOT_CUDA(
        cudaMemcpyAsync(host, device, floats * sizeof(float), cudaMemcpyDeviceToHost, context.stream()));
    TOPKNOT_CUDA(cudaStreamSynchronize(context.stream()));
  }
  void copy(const float* from, float* to, std::size_t floats) override {
    TOPKNOT_CUDA(cudaMemcpyAsync(to, from, floats * sizeof(float), cudaMemcpyDeviceToDevice,
                                 Context::current().stream()));
  }
  void add(DType type, const void* a, const void* b, void* out, std::size_t n) override {
    const cudaStream_t stream = Context::current().stream();
    if (type == DType::f32)
      cuda::add_floats(stream, static_cast<const float*>(a), static_cast<const float*>(b),
                       static_cast<float*>(out), n);
    else
      cuda::add_bfloat16(stream, a, b, out, n);
  }
  std::vector<std::uint64_t> checksums(std::span<const std::span<const float>> slices) override {
    const cudaStream_t stream = Context::current().stream();
    const cuda::DeviceArray<std::uint64_t> sums(slices.size());
    TOPKNOT_CUDA(cudaMemsetAsync(sums.data(), 0, sums.bytes(), stream));
    for (std::size_t i = 0; i < slices.size(); ++i)
      cuda::add_checksum(stream, slices[i].data(), slices[i].size(), sums.data() + i);
    std::vector<std::uint64_t> host(slices.size());
    TOPKNOT_CUDA(cudaMemcpyAsync(host.data(), sums.data(), sums.bytes(), cudaMemcpyDeviceToHost, stream));
    TOPKNOT_CUDA(cudaStreamSynchronize(stream));
    return host;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<cuda::Pool>> owners_;
};

}  // namespace

bool built_with_cuda() {
  return true;
}

std::string cuda_problem() {
  return cuda::problem();
}

bool cuda_available() {
  return cuda::problem().empty();
}

DeviceBackend& cuda_backend() {
  // Never destroyed: tensors may outlive static destruction order.
  static auto* instance = new CudaBackend;
  return *instance;
}

}  // namespace topknot
