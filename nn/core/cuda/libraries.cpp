#include "nn/core/cuda/libraries.h"

#include <fmt/format.h>

#include <algorithm>

namespace topknot::cuda {
namespace {

constexpr std::size_t kCublasWorkspace = std::size_t{32} << 20;  // what cuBLAS advises for Hopper

cublasMath_t math_of(Precision precision) {
  switch (precision) {
    case Precision::fp32:  // no fewer bits than fp32 has; the pedantic mode would only be slower
      break;
    case Precision::tf32:
      return CUBLAS_TF32_TENSOR_OP_MATH;
    case Precision::bf16:  // else parts of a long sum may be added as bfloat16
      return static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                       CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
  }
  return CUBLAS_DEFAULT_MATH;
}

// Kept by the context, which destroys them before its memory; no throwing there: the GPU may be lost.
struct Cublas {
  ~Cublas() {
    if (handle) cublasDestroy(handle);
  }
  cublasHandle_t handle = nullptr;
  DeviceArray<std::byte> workspace;
};
struct Cudnn {
  ~Cudnn() {
    if (handle) cudnnDestroy(handle);
  }
  cudnnHandle_t handle = nullptr;
};
struct TimedAlgorithms {
  std::optional<AlgorithmCache> cache;
};

}  // namespace

cublasContext* Context::cublas() {
  Cublas& cublas = keep<Cublas>();
  if (cublas.handle) return cublas.handle;
  TOPKNOT_CHECK(!capturing(stream_), "cuBLAS's first use fell into the capture of a CUDA graph");
  TOPKNOT_CUBLAS(cublasCreate(&cublas.handle));
  TOPKNOT_CUBLAS(cublasSetStream(cublas.handle, stream_));
  // Memory of our own: cuBLAS's would differ between a captured graph and plain calls.
  cublas.workspace = DeviceArray<std::byte>(kCublasWorkspace);
  TOPKNOT_CUBLAS(cublasSetWorkspace(cublas.handle, cublas.workspace.data(), cublas.workspace.bytes()));
  TOPKNOT_CUBLAS(cublasSetMathMode(cublas.handle, math_of(options_.precision)));
  return cublas.handle;
}

cudnnContext* Context::cudnn() {
  Cudnn& cudnn = keep<Cudnn>();
  if (cudnn.handle) return cudnn.handle;
  TOPKNOT_CUDNN(cudnnCreate(&cudnn.handle));
  TOPKNOT_CUDNN(cudnnSetStream(cudnn.handle, stream_));
  return cudnn.handle;
}

AlgorithmCache& Context::algorithm_cache() {
  std::optional<AlgorithmCache>& cache = keep<TimedAlgorithms>().cache;
  if (cache) return *cache;
  if (options_.algorithm_cache.empty()) return cache.emplace();
  cudaDeviceProp properties{};
  TOPKNOT_CUDA(cudaGetDeviceProperties(&properties, options_.device));
  int driver = 0;
  TOPKNOT_CUDA(cudaDriverGetVersion(&driver));
  std::string name =
      fmt::format("{}, {} multiprocessors, CUDA {}.{}, cuDNN {}", properties.name,
                  properties.multiProcessorCount, driver / 1000, driver % 1000 / 10, cudnnGetVersion());
  std::replace(name.begin(), name.end(), '/', ' ');
  return cache.emplace(options_.algorithm_cache + "/" + name + ".txt");
}

}  // namespace topknot::cuda
