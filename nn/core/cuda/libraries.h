#pragma once
// cuBLAS and cuDNN in a context: its handles of them, made at their first use (Context::cublas(),
// Context::cudnn()), the file of algorithms that were timed (Context::algorithm_cache()), and their errors.

#include <cublas_v2.h>
#include <cudnn.h>

#include <string>

#include "nn/base/algorithm_cache.h"
#include "nn/core/cuda/check.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {

// Check cuBLAS and cuDNN calls, as check_cuda checks CUDA's.
inline void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail_cuda(call, std::string(cublasGetStatusString(status)) + " (" + cublasGetStatusName(status) + ")",
              file, line);
}
inline void check_cudnn(cudnnStatus_t status, const char* call, const char* file, int line) {
  if (status != CUDNN_STATUS_SUCCESS) fail_cuda(call, cudnnGetErrorString(status), file, line);
}

}  // namespace topknot::cuda

#define TOPKNOT_CUBLAS(call) ::topknot::cuda::check_cublas((call), #call, __FILE__, __LINE__)
#define TOPKNOT_CUDNN(call) ::topknot::cuda::check_cudnn((call), #call, __FILE__, __LINE__)
