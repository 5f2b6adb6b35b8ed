#pragma once
// Checks of cuBLAS and cuDNN calls, as TOPKNOT_CUDA is of CUDA's.

#include <cublas_v2.h>
#include <cudnn.h>

#include "nn/core/cuda/check.h"

namespace topknot::cuda {

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
