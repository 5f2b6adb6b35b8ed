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

cudaStream_t stream() {
  return Context::current().stream();
}

// Never destroyed: tensors may outlive static destruction order.
struct Owners {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<cuda::Pool>> pools;  // by the memory that they gave
};
Owners& owners() {
  static auto* owners = new Owners;
  return *owners;
}

float* allocate(std::size_t floats) {
  const std::shared_ptr<cuda::Pool> pool = Context::current().pool();
  void* data = pool->allocate(floats * sizeof(float));
  const std::lock_guard lock(owners().mutex);
  owners().pools[data] = pool;
  return static_cast<float*>(data);
}

void release(float* data, std::size_t) {
  std::shared_ptr<cuda::Pool> pool;
  {
    const std::lock_guard lock(owners().mutex);
    const auto at = owners().pools.find(data);
    if (at == owners().pools.end()) return;
    pool = std::move(at->second);
    owners().pools.erase(at);
  }
  pool->release(data);
}

void copy_and_wait(float* to, const float* from, std::size_t floats, cudaMemcpyKind kind) {
  TOPKNOT_CUDA(cudaMemcpyAsync(to, from, floats * sizeof(float), kind, stream()));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream()));
}

void add_of_type(DType type, const void* a, const void* b, void* out, std::size_t n) {
  if (type == DType::f32)
    cuda::add_floats(stream(), static_cast<const float*>(a), static_cast<const float*>(b),
                     static_cast<float*>(out), n);
  else
    cuda::add_bfloat16(stream(), a, b, out, n);
}

std::vector<std::uint64_t> checksums_of(std::span<const std::span<const float>> slices) {
  const cuda::DeviceArray<std::uint64_t> sums(slices.size());
  TOPKNOT_CUDA(cudaMemsetAsync(sums.data(), 0, sums.bytes(), stream()));
  for (std::size_t i = 0; i < slices.size(); ++i)
    cuda::add_checksum(stream(), slices[i].data(), slices[i].size(), sums.data() + i);
  std::vector<std::uint64_t> host(slices.size());
  TOPKNOT_CUDA(cudaMemcpyAsync(host.data(), sums.data(), sums.bytes(), cudaMemcpyDeviceToHost, stream()));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream()));
  return host;
}

constexpr DeviceBackend kBackend{
    .allocate = allocate,
    .release = release,
    .release_cached = [] { Context::current().pool()->release_cached(); },
    .to_device = [](float* device, const float* host,
                    std::size_t n) { copy_and_wait(device, host, n, cudaMemcpyHostToDevice); },
    .to_host = [](float* host, const float* device,
                  std::size_t n) { copy_and_wait(host, device, n, cudaMemcpyDeviceToHost); },
    .fill_zero = [](float* data,
                    std::size_t n) { TOPKNOT_CUDA(cudaMemsetAsync(data, 0, n * sizeof(float), stream())); },
    .fill = [](float* data, std::size_t n, float value) { cuda::fill_floats(stream(), data, n, value); },
    .copy =
        [](const float* from, float* to, std::size_t n) {
          TOPKNOT_CUDA(cudaMemcpyAsync(to, from, n * sizeof(float), cudaMemcpyDeviceToDevice, stream()));
        },
    .add = add_of_type,
    .add_scaled = [](float* sum, const float* values, std::size_t n,
                     float factor) { cuda::add_scaled_floats(stream(), sum, values, n, factor); },
    .add_to_sum = [](double* sum, const float* value,
                     double factor) { cuda::add_to_sum(stream(), sum, value, factor); },
    .restore_if_bad = [](const StepStatus* status, const float* from, float* to,
                         std::size_t n) { cuda::restore_if_bad(stream(), status, from, to, n); },
    .checksums = checksums_of,
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

int gpu_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // no GPU: no failure of a later call
  return 0;
}

std::string gpu_bus(int gpu) {
  char bus[32] = "";
  TOPKNOT_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, gpu));
  return bus;
}

const DeviceBackend& cuda_backend() {
  return kBackend;
}

}  // namespace topknot
