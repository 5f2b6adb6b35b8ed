#pragma once
// Shared by linear layers, LSTMs and convolutions on a GPU: products of row-major matrices by cuBLAS, the
// bias and its gradient, and a copy of channels. `bf16`: of bfloat16 numbers, with arithmetic in float.

#include <cstddef>
#include <cstdint>

#include "nn/core/autograd.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/filters.h"

namespace topknot::cuda {

struct Operand {
  const void* data;
  bool transposed;          // stored as the transpose of what takes part in the product
  std::int64_t stride = 0;  // elements from one stored row to the next; 0: rows are contiguous
};

// c = op(a) op(b), or with `add` c += that, on the current context's stream, where op(a) is [m, k], op(b) is
// [k, n] and c is [m, n], none of them empty; `stride` is that of c's rows, or 0. `inputs` is the type of a and b; c has it
// too, or is f32. Sums are in fp32, with the inputs' products in the precision that Context::options()
// states. Deterministic for a context's one stream. Throws Error for sizes of 2^31 and more.
void multiply(std::int64_t m, std::int64_t n, std::int64_t k, DType inputs, Operand a, Operand b, bool add,
              void* c, DType output, std::int64_t stride = 0);

// y[..., c] += bias[c]. The channel is the fastest dimension of y in memory: nhwc, or [N, out].
void add_bias(Tensor& y, const Tensor& bias);
void add_bias(cudaStream_t stream, void* y, bool bf16, const float* bias, std::size_t rows,
              std::size_t channels);

// The bias' gradient if wanted, written or added: the sum of the output's gradient over all but the channel.
void bias_gradient(const Tensor& dy, const GradientTarget& target);
// sums[c] = sum over the rows of x[i, c], or sums[c] += that. Summed in an order that rows and channels
// decide, so with the same bits in every run. `scratch`: column_sums_scratch() floats, or null if that is 0.
std::size_t column_sums_scratch(std::size_t rows, std::size_t channels);
void column_sums(cudaStream_t stream, const void* x, bool bf16, std::size_t rows, std::size_t channels,
                 float* scratch, float* sums, bool accumulate);

// In N, H, W, C order: channels from + i from_step of x, which has from_channels, become channels to + i
// to_step of y, for i < count, in each of `rows` pixels; with `accumulate` they are added. In concat.cu.
struct ChannelCopy {
  std::uint32_t rows, count, from_channels, from, from_step, to_channels, to, to_step;
};
void copy_channels(cudaStream_t stream, bool bf16, const void* x, void* y, ChannelCopy copy, bool accumulate);

}  // namespace topknot::cuda
