#include "nn/ops/cuda/gemm.h"

#include <limits>

#include "nn/core/cuda/library.h"
#include "nn/ops/cuda/conv_layout.h"

namespace topknot::cuda {
namespace {

cudaDataType_t type_of(DType type) {
  return type == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

int as_int(std::int64_t size) {
  TOPKNOT_CHECK(size > 0 && size <= std::numeric_limits<int>::max(),
                "a matrix with a side of " + std::to_string(size) + " is beyond cuBLAS");
  return static_cast<int>(size);
}

}  // namespace

void multiply(Context& context, std::int64_t m, std::int64_t n, std::int64_t k, DType inputs, Operand a,
              Operand b, float beta, void* c, DType output) {
  // cuBLAS counts by columns: what it takes for the transposes of our matrices are the matrices themselves, so it
  // computes c^T = op(b)^T op(a)^T.
  const float alpha = 1.0f;
  const int rows = as_int(n), columns = as_int(m), depth = as_int(k);
  TOPKNOT_CUBLAS(cublasGemmEx(context.cublas(), b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                              a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, rows, columns, depth, &alpha, b.data,
                              type_of(inputs), b.transposed ? depth : rows, a.data, type_of(inputs),
                              a.transposed ? columns : depth, &beta, c, type_of(output), rows,
                              CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

Tensor weight_as(DType type, const Tensor& weight) {
  if (type == DType::f32) return weight;
  const Shape flat{1, weight.numel()};
  Tensor copy = Tensor::empty(flat, Layout::plain, weight.device(), type);
  filter_from_weight(Context::current().stream(), weight.data(), copy.data(), type == DType::bf16,
                     {1, weight.numel(), 1});
  return copy;
}

}  // namespace topknot::cuda
