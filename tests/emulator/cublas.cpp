// cuBLAS on the machine of machine.h.
#include <cublas_v2.h>

#include "tests/emulator/cudnn_descriptors.h"
#include "tests/emulator/machine.h"
#include "tests/emulator/machine_state.h"

using namespace topknot::emulator;

struct cublasContext {
  cudaStream_t stream = nullptr;
  bool workspace = false;  // the caller's, which a new stream takes away
};

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  if (const int error = injected("cublasCreate")) return static_cast<cublasStatus_t>(error);
  {
    const std::lock_guard lock(state().mutex);
    if (captures()) return CUBLAS_STATUS_NOT_INITIALIZED;  // seen on an H200
  }
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  handle->workspace = false;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* data, std::size_t) {
  if (reinterpret_cast<std::uintptr_t>(data) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
  handle->workspace = true;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                            int n, int k, const void* alpha, const void* a, cudaDataType_t a_type, int lda,
                            const void* b, cudaDataType_t b_type, int ldb, const void* beta, void* c,
                            cudaDataType_t c_type, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t) {
  if (const int error = injected("cublasGemmEx")) return static_cast<cublasStatus_t>(error);
  // Without it cuBLAS takes memory of its own, another one in a capture.
  if (!handle->workspace) return CUBLAS_STATUS_NOT_INITIALIZED;
  const bool turn_a = op_a == CUBLAS_OP_T, turn_b = op_b == CUBLAS_OP_T;
  if (m <= 0 || n <= 0 || k <= 0 || !a || !b || !c || lda < (turn_a ? k : m) || ldb < (turn_b ? n : k) ||
      ldc < m)
    return CUBLAS_STATUS_INVALID_VALUE;
  const auto known = [](cudaDataType_t type) { return type == CUDA_R_32F || type == CUDA_R_16BF; };
  if (compute != CUBLAS_COMPUTE_32F || !known(a_type) || a_type != b_type ||
      (c_type != a_type && c_type != CUDA_R_32F))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  // The factors are read at once, in the host's memory; the matrices at their turn.
  const float by = *static_cast<const float*>(alpha), old = *static_cast<const float*>(beta);
  enqueue(handle->stream, [=] {
    const auto type = [](cudaDataType_t t) {
      return t == CUDA_R_32F ? CUDNN_DATA_FLOAT : CUDNN_DATA_BFLOAT16;
    };
    const auto at = [](int row, int column, int ld) {
      return std::size_t(column) * std::size_t(ld) + std::size_t(row);
    };
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < m; ++i) {
        float sum = 0;
        for (int p = 0; p < k; ++p)
          sum += load(type(a_type), a, turn_a ? at(p, i, lda) : at(i, p, lda)) *
                 load(type(b_type), b, turn_b ? at(j, p, ldb) : at(p, j, ldb));
        const std::size_t to = at(i, j, ldc);
        store(type(c_type), c, to, by * sum + (old == 0 ? 0 : old * load(type(c_type), c, to)));
      }
  });
  return CUBLAS_STATUS_SUCCESS;
}
const char* cublasGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_EXECUTION_FAILED";
}
const char* cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "the execution failed";
}

}  // extern "C"
