// GPU memory for tensors, blocks of the current context's pool, which a tensor may outlive; its kernels.
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "nn/base/checksum.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/cuda/pool.h"
#include "nn/core/device.h"

namespace topknot {
namespace cuda {
namespace {

constexpr int kPerThread = 4;

__global__ void fill_kernel(float* data, std::size_t n, float value) {
  await_previous();
  std::size_t i = (std::size_t{blockIdx.x} * kThreads * kPerThread) + threadIdx.x;
  for (int j = 0; j < kPerThread; ++j, i += kThreads)
    if (i < n) data[i] = value;
}

template <class T>
__global__ void add_kernel(const T* a, const T* b, T* out, std::size_t n) {
  await_previous();
  std::size_t i = (std::size_t{blockIdx.x} * kThreads * kPerThread) + threadIdx.x;
  for (int j = 0; j < kPerThread; ++j, i += kThreads)
    if (i < n) out[i] = from_float<T>(as_float(a[i]) + as_float(b[i]));
}

__global__ void __launch_bounds__(kThreads)
    add_scaled_kernel(float* sum, const float* values, std::size_t n, float factor) {
  const std::size_t i = awaited_index();
  if (i < n) sum[i] += factor * values[i];
}

__global__ void add_to_sum_kernel(double* sum, const float* value, double factor) {
  await_previous();
  *sum += factor * static_cast<double>(*value);
}

__global__ void __launch_bounds__(kThreads)
    restore_kernel(const StepStatus* status, const float* from, float* to, std::size_t n) {
  await_previous();
  if (status->bad == 0) return;
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) to[i] = from[i];
}

__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const float* data, std::size_t n, unsigned long long* sum) {
  await_previous();
  std::uint64_t mine = 0;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * kThreads)
    mine += checksum_term(i, __float_as_uint(data[i]));
  mine = block_sum(mine);
  if (threadIdx.x == 0) atomicAdd(sum, static_cast<unsigned long long>(mine));
}

__global__ void time_kernel(std::uint64_t* at) {
  await_previous();
  *at = global_nanoseconds();
}

__global__ void hold_kernel(std::uint64_t nanoseconds) {
  await_previous();
  const std::uint64_t begin = global_nanoseconds();
  while (global_nanoseconds() - begin < nanoseconds) {
  }
}

}  // namespace

bool kernels_await() {
  cudaFuncAttributes code{};
  TOPKNOT_CUDA(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(time_kernel)));
  return code.ptxVersion >= 90;
}

void write_time(cudaStream_t stream, std::uint64_t* at) {
  launch(time_kernel, 1, 1, stream, at);
}

void hold(cudaStream_t stream, std::uint64_t nanoseconds) {
  launch(hold_kernel, 1, 1, stream, nanoseconds);
}

void add(cudaStream_t stream, DType type, const void* a, const void* b, void* out, std::size_t n) {
  if (n == 0) return;
  by_type(type == DType::bf16, [&]<class T>(T) {
    launch(add_kernel<T>, grid_for(n, kThreads * kPerThread), kThreads, stream, static_cast<const T*>(a),
           static_cast<const T*>(b), static_cast<T*>(out), n);
  });
}

namespace {

// Never destroyed: tensors may outlive static destruction order.
struct Owners {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<Pool>> pools;  // by the memory that they gave
};
Owners& owners() {
  static auto* owners = new Owners;
  return *owners;
}

float* allocate(std::size_t floats) {
  const std::shared_ptr<Pool> pool = Context::current().pool();
  void* data = pool->allocate(floats * sizeof(float));
  const std::lock_guard lock(owners().mutex);
  owners().pools[data] = pool;
  return static_cast<float*>(data);
}

void release(float* data, std::size_t) {
  std::shared_ptr<Pool> pool;
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
  TOPKNOT_CUDA(cudaMemcpyAsync(to, from, floats * sizeof(float), kind, compute_stream()));
  TOPKNOT_CUDA(cudaStreamSynchronize(compute_stream()));
}

std::vector<std::uint64_t> checksums_of(std::span<const std::span<const float>> slices) {
  static_assert(sizeof(unsigned long long) == sizeof(std::uint64_t));
  const DeviceArray<unsigned long long> sums(slices.size());
  TOPKNOT_CUDA(cudaMemsetAsync(sums.data(), 0, sums.bytes(), compute_stream()));
  for (std::size_t i = 0; i < slices.size(); ++i)
    if (const std::size_t n = slices[i].size(); n > 0)
      launch(checksum_kernel, grid_for(n, kThreads * kPerThread, 2048), kThreads, compute_stream(),
             slices[i].data(), n, sums.data() + i);
  std::vector<std::uint64_t> host(slices.size());
  TOPKNOT_CUDA(
      cudaMemcpyAsync(host.data(), sums.data(), sums.bytes(), cudaMemcpyDeviceToHost, compute_stream()));
  TOPKNOT_CUDA(cudaStreamSynchronize(compute_stream()));
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
    .fill_zero =
        [](float* data, std::size_t n) {
          TOPKNOT_CUDA(cudaMemsetAsync(data, 0, n * sizeof(float), compute_stream()));
        },
    .fill =
        [](float* data, std::size_t n, float value) {
          if (n > 0)
            launch(fill_kernel, grid_for(n, kThreads * kPerThread), kThreads, compute_stream(), data, n,
                   value);
        },
    .copy =
        [](const float* from, float* to, std::size_t n) {
          TOPKNOT_CUDA(
              cudaMemcpyAsync(to, from, n * sizeof(float), cudaMemcpyDeviceToDevice, compute_stream()));
        },
    .add = [](DType type, const void* a, const void* b, void* out,
              std::size_t n) { add(compute_stream(), type, a, b, out, n); },
    .add_scaled =
        [](float* sum, const float* values, std::size_t n, float factor) {
          if (n > 0)
            launch(add_scaled_kernel, grid_for(n, kThreads), kThreads, compute_stream(), sum, values, n,
                   factor);
        },
    .add_to_sum =
        [](double* sum, const float* value, double factor) {
          launch(add_to_sum_kernel, 1, 1, compute_stream(), sum, value, factor);
        },
    .restore_if_bad =
        [](const StepStatus* status, const float* from, float* to, std::size_t n) {
          if (n > 0)
            launch(restore_kernel, grid_for(n, kThreads), kThreads, compute_stream(), status, from, to, n);
        },
    .checksums = checksums_of,
};

}  // namespace
}  // namespace cuda

bool built_with_cuda() {
  return true;
}

std::string cuda_problem() {
  // Read when CUDA starts. By default the streams of a process' ranks share, and wait in, 8 hardware queues.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  return cuda::problem();
}

bool cuda_available() {
  return cuda_problem().empty();
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
  return cuda::kBackend;
}

}  // namespace topknot
