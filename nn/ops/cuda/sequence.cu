#include "nn/core/cuda/kernel_tools.h"
#include "nn/ops/cuda/sequence_kernels.h"

namespace topknot::cuda {
namespace {

// -1 where the row's id is no token.
__device__ inline std::int64_t id_of(const float* ids, std::uint32_t row, EmbeddingShape s) {
  const float id = ids[row % s.batch * s.steps + row / s.batch];
  return id >= 0 && id < static_cast<float>(s.tokens) ? static_cast<std::int64_t>(id) : -1;
}

// A block per row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const float* __restrict__ ids, const float* __restrict__ weight, EmbeddingShape s,
                     T* __restrict__ y) {
  const std::uint32_t row = blockIdx.x;
  const std::int64_t id = id_of(ids, row, s);
  for (std::uint32_t j = threadIdx.x; j < s.width; j += kThreads)
    y[std::size_t{row} * s.width + j] = from_float<T>(id < 0 ? nanf("") : weight[id * s.width + j]);
}

// A block per row: that of a token's first row adds up all rows of the token.
template <class T>
__global__ void __launch_bounds__(kThreads)
    embedding_gradient_kernel(const float* __restrict__ ids, const T* __restrict__ dy, EmbeddingShape s,
                              float* __restrict__ dw) {
  const std::uint32_t first = blockIdx.x, rows = s.batch * s.steps;
  const std::int64_t id = id_of(ids, first, s);
  if (id < 0) return;
  for (std::uint32_t row = 0; row < first; ++row)
    if (id_of(ids, row, s) == id) return;  // all threads
  for (std::uint32_t j = threadIdx.x; j < s.width; j += kThreads) {
    float sum = dw[id * s.width + j];
    for (std::uint32_t row = first; row < rows; ++row)
      if (id_of(ids, row, s) == id) sum += as_float(dy[std::size_t{row} * s.width + j]);
    dw[id * s.width + j] = sum;
  }
}

__device__ inline float logistic(float x) {
  return 1.0f / (1.0f + expf(-x));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gates_kernel(LstmStep s, const float* __restrict__ input_bias, const float* __restrict__ recurrent_bias,
                 float* __restrict__ cell, T* __restrict__ y) {
  const std::uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= s.batch * s.width) return;
  const std::uint32_t row = at / s.width, j = at % s.width;
  float* gates = s.gates + std::size_t{row} * 4 * s.width;
  const auto sum = [&](std::uint32_t k) {
    return gates[k * s.width + j] + (input_bias[k * s.width + j] + recurrent_bias[k * s.width + j]);
  };
  const float i = logistic(sum(0)), f = logistic(sum(1)), g = tanhf(sum(2)), o = logistic(sum(3));
  const float c = f * s.cell_before[at] + i * g;
  gates[j] = i;
  gates[s.width + j] = f;
  gates[2 * s.width + j] = g;
  gates[3 * s.width + j] = o;
  cell[at] = c;
  y[at] = from_float<T>(o * tanhf(c));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gates_gradient_kernel(LstmStep s, const float* __restrict__ cell, const T* __restrict__ dy,
                          const float* later, const float* dcell, float* dcell_out, T* dsums) {
  const std::uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= s.batch * s.width) return;
  const std::uint32_t j = at % s.width;
  const std::size_t row = std::size_t{at / s.width} * 4 * s.width;
  float* gates = s.gates + row;
  const float i = gates[j], f = gates[s.width + j], g = gates[2 * s.width + j], o = gates[3 * s.width + j];
  const float t = tanhf(cell[at]), dh = as_float(dy[at]) + (later ? later[at] : 0.0f);
  const float dc = (dcell ? dcell[at] : 0.0f) + dh * o * (1.0f - t * t);
  const float d[4] = {dc * g * i * (1.0f - i), dc * s.cell_before[at] * f * (1.0f - f),
                      dc * i * (1.0f - g * g), dh * t * o * (1.0f - o)};
  for (std::uint32_t k = 0; k < 4; ++k) {
    gates[k * s.width + j] = d[k];
    if (dsums) dsums[row + k * s.width + j] = from_float<T>(d[k]);
  }
  dcell_out[at] = dc * f;
}

}  // namespace

void embedding_rows(cudaStream_t stream, const float* ids, const float* weight, EmbeddingShape shape,
                    bool bf16, void* y) {
  by_type(bf16, [&](auto type) {
    using T = decltype(type);
    launch(embedding_kernel<T>, dim3(shape.rows()), kThreads, stream, ids, weight, shape, static_cast<T*>(y));
  });
}

void embedding_gradient(cudaStream_t stream, const float* ids, const void* dy, bool bf16,
                        EmbeddingShape shape, float* dw) {
  by_type(bf16, [&](auto type) {
    using T = decltype(type);
    launch(embedding_gradient_kernel<T>, dim3(shape.rows()), kThreads, stream, ids, static_cast<const T*>(dy),
           shape, dw);
  });
}

void lstm_gates(cudaStream_t stream, const LstmStep& step, const float* input_bias,
                const float* recurrent_bias, float* cell, void* y, bool bf16) {
  by_type(bf16, [&](auto type) {
    using T = decltype(type);
    launch(gates_kernel<T>, grid_for(step.size(), kThreads), kThreads, stream, step, input_bias,
           recurrent_bias, cell, static_cast<T*>(y));
  });
}

void lstm_gates_gradient(cudaStream_t stream, const LstmStep& step, const float* cell, const void* dy,
                         bool bf16, const float* later, const float* dcell, float* dcell_out, void* dsums) {
  by_type(bf16, [&](auto type) {
    using T = decltype(type);
    launch(gates_gradient_kernel<T>, grid_for(step.size(), kThreads), kThreads, stream, step, cell,
           static_cast<const T*>(dy), later, dcell, dcell_out, static_cast<T*>(dsums));
  });
}

}  // namespace topknot::cuda
