#include "nn/ops/cuda/gemm.h"

#include <fmt/format.h>

#include <limits>

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/conv_layout.h"

namespace topknot::cuda {
namespace {

cudaDataType_t type_of(DType type) {
  return type == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

int as_int(std::int64_t size) {
  TOPKNOT_CHECK(size > 0 && size <= std::numeric_limits<int>::max(),
                fmt::format("a matrix with a side of {} is beyond cuBLAS", size));
  return static_cast<int>(size);
}

struct Rows {
  std::size_t rows, channels;
  explicit Rows(const Tensor& y)
      : rows(static_cast<std::size_t>(y.numel() / y.dim(1))), channels(static_cast<std::size_t>(y.dim(1))) {}
};

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

void add_bias(Tensor& y, const Tensor& bias) {
  const Rows of(y);
  add_bias(Context::current().stream(), y.data(), y.dtype() == DType::bf16, bias.data(), of.rows,
           of.channels);
}

void bias_gradient(const Tensor& dy, const GradientTarget& target) {
  if (!target.data) return;
  const Rows of(dy);
  const DeviceArray<float> scratch(column_sums_scratch(of.rows, of.channels));
  column_sums(Context::current().stream(), dy.data(), dy.dtype() == DType::bf16, of.rows, of.channels,
              scratch.data(), target.data, target.accumulate);
}

}  // namespace topknot::cuda
