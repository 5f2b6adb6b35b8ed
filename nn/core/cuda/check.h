#pragma once
// Failures of CUDA and its libraries as exceptions that name the call, the place and the rank.

#include <cuda_runtime_api.h>

#include <string>

#include "nn/base/check.h"

namespace topknot::cuda {

// A call of CUDA, cuDNN, cuBLAS or NCCL that failed. The GPU may be of no further use to this process.
class CudaError : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

// The GPU's memory is used up; the message says what was asked for, what is free, and what to lower.
class OutOfMemory : public CudaError {
 public:
  using CudaError::CudaError;
};

// Throws CudaError unless `status` is cudaSuccess: "cudaMalloc: out of memory (cudaErrorMemoryAllocation),
// rank 3, at file:line". Faults after which a GPU is lost to the process say so.
void check_cuda(cudaError_t status, const char* call, const char* file, int line);
// For libraries with codes of their own: fails with `what`.
[[noreturn]] void fail_cuda(const std::string& call, const std::string& what, const char* file, int line);
// After a launch: throws CudaError with the kernel's name if it could not be started.
void check_launch(const void* kernel, unsigned grid, unsigned block);

}  // namespace topknot::cuda

#define TOPKNOT_CUDA(call) ::topknot::cuda::check_cuda((call), #call, __FILE__, __LINE__)
