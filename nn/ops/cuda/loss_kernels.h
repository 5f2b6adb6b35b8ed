#pragma once
// Kernels of the losses. Rows and outputs are float or, with bf16, bfloat16; losses are taken in double, in a fixed
// order. A NaN comes through. Sizes are positive.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace topknot::cuda {

struct Rows {
  const void* data = nullptr;  // [rows, classes]
  bool bf16 = false;
  std::int64_t rows = 0, classes = 0;
};

// What the backward pass needs of a row's softmax: exp(z - top) / sum. A label that is no class makes the row's loss
// and its gradients NaN, since kernels cannot throw.
struct SoftmaxRow {
  double sum;
  float top;
};

// loss[i] = -sum_c t_c log softmax(z_i)[c], t as in nn/ops/loss.h; 0 where the row is masked
void cross_entropy_rows(cudaStream_t stream, const Rows& logits, const std::int32_t* labels, float smoothing,
                        SoftmaxRow* softmax, double* loss);
// *counted = rows that are not masked, at least 1; *loss = the sum of `losses`, a row each, over that
void mean_of_unmasked(cudaStream_t stream, const double* losses, const std::int32_t* labels, std::size_t rows,
                      double* counted, float* loss);
// dz = (softmax(z) - t) grad[0] / counted
void cross_entropy_backward(cudaStream_t stream, const Rows& logits, const std::int32_t* labels,
                            float smoothing, const SoftmaxRow* softmax, const double* counted,
                            const float* grad, void* dz);
// hit[i] = 1 where the row's label is among its `top` greatest classes, as nn/ops/loss.h has it, else 0
void count_hits(cudaStream_t stream, const Rows& logits, const std::int32_t* labels, int top, double* hit);

// (y - target)^2 summed by blocks: partial[squared_error_blocks(n)].
std::size_t squared_error_blocks(std::size_t n);
void squared_error(cudaStream_t stream, bool bf16, const void* y, const float* target, std::size_t n,
                   double* partial);
// dy = (y - target) (2 grad[0] / n)
void squared_error_backward(cudaStream_t stream, bool bf16, const void* y, const float* target, std::size_t n,
                            const float* grad, void* dy);

// out = sum of n values / by, as a float; and total += the sum.
void mean_of(cudaStream_t stream, const double* values, std::size_t n, double by, float* out);
void add_sum(cudaStream_t stream, const double* values, std::size_t n, double* total);

}  // namespace topknot::cuda
