#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// Sizes are positive.
struct EmbeddingShape {
  std::uint32_t batch, steps, tokens, width;
  __host__ __device__ std::uint32_t rows() const { return batch * steps; }
};

EmbeddingShape shape_of(const Tensor& ids, std::int64_t tokens, std::int64_t width) {
  return {word(ids.dim(0)), word(ids.dim(1)), word(tokens), word(width)};
}

// -1 if the row's id is no token.
__device__ inline std::int64_t id_of(const float* ids, std::uint32_t row, EmbeddingShape s) {
  const float id = ids[row % s.batch * s.steps + row / s.batch];
  return id >= 0 && id < static_cast<float>(s.tokens) ? static_cast<std::int64_t>(id) : -1;
}

// y[t batch + b] = weight[ids[b steps + t]]; NaN if the id is no token. A block per row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const float* __restrict__ ids, const float* __restrict__ weight, EmbeddingShape s,
                     T* __restrict__ y) {
  await_previous();
  const std::uint32_t row = blockIdx.x;
  const std::int64_t id = id_of(ids, row, s);
  for (std::uint32_t j = threadIdx.x; j < s.width; j += kThreads)
    y[std::size_t{row} * s.width + j] = from_float<T>(id < 0 ? nanf("") : weight[id * s.width + j]);
}

Tensor forward(const Tensor& ids, const Tensor& weight) {
  const Context& context = Context::current();
  const EmbeddingShape shape = shape_of(ids, weight.dim(0), weight.dim(1));
  Tensor y =
      Tensor::empty({ids.numel(), weight.dim(1)}, Layout::plain, context.device(), context.activation_type());
  by_type(y, [&]<class T>(T) {
    launch_in_turn(embedding_kernel<T>, dim3(shape.rows()), kThreads, context.stream(), ids.data(),
                   weight.data(), shape, y.as<T>());
  });
  return y;
}

// A token's rows lie in [rows - from_end, end); both are 0 if it has none.
struct TokenRows {
  std::uint32_t from_end, end;
};

__global__ void __launch_bounds__(kThreads)
    token_rows_kernel(const float* __restrict__ ids, EmbeddingShape s, TokenRows* __restrict__ tokens) {
  await_previous();
  const std::uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  const std::int64_t id = row < s.rows() ? id_of(ids, row, s) : -1;
  if (id < 0) return;
  atomicMax(&tokens[id].from_end, s.rows() - row);
  atomicMax(&tokens[id].end, row + 1);
}

// dw[id] += the sum of dy's rows with this id, in their order. A block per row and kThreads columns: that of a
// token's first row adds up all rows of the token. The block looks at kThreads rows at a time.
template <class T>
__global__ void __launch_bounds__(kThreads)
    embedding_gradient_kernel(const float* __restrict__ ids, const T* __restrict__ dy, EmbeddingShape s,
                              const TokenRows* __restrict__ tokens, float* __restrict__ dw) {
  await_previous();
  __shared__ std::uint32_t same[kThreads];  // the rows of this token among those looked at, in their order
  const std::uint32_t first = blockIdx.x, column = blockIdx.y * kThreads + threadIdx.x;
  const std::int64_t id = id_of(ids, first, s);
  if (id < 0 || tokens[id].from_end != s.rows() - first) return;  // the whole block
  const std::uint32_t end = tokens[id].end;
  float* const to = dw + id * s.width + column;
  float sum = column < s.width ? *to : 0;
  for (std::uint32_t begin = first; begin < end; begin += kThreads) {
    const std::uint32_t row = begin + threadIdx.x;
    const unsigned mine = row < end && id_of(ids, row, s) == id;
    if (!__syncthreads_or(static_cast<int>(mine))) continue;
    unsigned count = 0;
    const unsigned before = block_exclusive_sum(mine, count);
    if (mine) same[before] = row;
    __syncthreads();
    if (column < s.width) {
#pragma unroll 4
      for (unsigned i = 0; i < count; ++i) sum += as_float(dy[std::size_t{same[i]} * s.width + column]);
    }
    __syncthreads();
  }
  if (column < s.width) *to = sum;
}

void backward(const Tensor& ids, const Tensor& dy, std::int64_t tokens, const GradientTarget& weight) {
  if (!weight.data) return;
  const EmbeddingShape shape = shape_of(ids, tokens, dy.dim(1));
  if (!weight.accumulate)
    backend(dy.device()).fill_zero(weight.data, static_cast<std::size_t>(tokens * dy.dim(1)));
  const DeviceArray<TokenRows> found(static_cast<std::size_t>(tokens));
  TOPKNOT_CUDA(cudaMemsetAsync(found.data(), 0, found.bytes(), compute_stream()));
  launch_in_turn(token_rows_kernel, grid_for(shape.rows(), kThreads), kThreads, compute_stream(), ids.data(),
                 shape, found.data());
  const dim3 grid(shape.rows(), grid_for(shape.width, kThreads).x);
  by_type(dy, [&]<class T>(T) {
    launch_in_turn(embedding_gradient_kernel<T>, grid, kThreads, compute_stream(), ids.data(), dy.as<T>(),
                   shape, found.data(), weight.data);
  });
}

const bool registered = add_cuda_kernels<EmbeddingKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda
