#include "nn/ops/cuda/products.h"

#include <limits>

#include "nn/core/cuda/libraries.h"
#include "nn/ops/cuda/op_tools.h"

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

constexpr int kPerThread = 4;
// Column sums: a block sums kColumns columns of a slab of rows, kGroups rows at a time.
constexpr int kColumns = 32, kGroups = kThreads / kColumns;
constexpr std::size_t kRowsPerSlab = 256, kMostSlabs = 1024;

// One division per thread: the elements of a thread are kThreads apart, and so are their channels.
template <class T>
__global__ __launch_bounds__(kThreads) void bias_kernel(T* y, const float* bias, std::size_t n,
                                                        unsigned channels) {
  await_previous();
  std::size_t at = std::size_t{blockIdx.x} * kThreads * kPerThread + threadIdx.x;
  unsigned c = static_cast<unsigned>(at % channels);
  const unsigned step = kThreads % channels;
  for (int j = 0; j < kPerThread; ++j, at += kThreads) {
    if (at >= n) return;
    y[at] = from_float<T>(as_float(y[at]) + bias[c]);
    c += step;
    if (c >= channels) c -= channels;
  }
}

// The same where rows consist of whole pieces of 16 bytes.
template <class T>
struct alignas(16) Piece {
  static constexpr unsigned kSize = 16 / sizeof(T);
  T at[kSize];
};
template <class T>
__global__ __launch_bounds__(kThreads) void bias_pieces_kernel(Piece<T>* y, const float* bias,
                                                               std::size_t pieces, unsigned pieces_of_row) {
  const std::size_t i = awaited_index();
  if (i >= pieces) return;
  const float* of = bias + static_cast<unsigned>(i % pieces_of_row) * Piece<T>::kSize;
  Piece<T> piece = y[i];
#pragma unroll
  for (unsigned e = 0; e < Piece<T>::kSize; ++e) piece.at[e] = from_float<T>(as_float(piece.at[e]) + of[e]);
  y[i] = piece;
}

// Block: slab s of column tile t, at s * tiles + t. sums is [slabs, channels].
template <class T>
__global__ __launch_bounds__(kThreads) void column_sums_kernel(const T* x, std::size_t rows,
                                                               unsigned channels, std::size_t rows_per_slab,
                                                               float* sums, bool accumulate) {
  await_previous();
  __shared__ float partial[kThreads];
  const unsigned tiles = (channels + kColumns - 1) / kColumns;
  const std::size_t slab = blockIdx.x / tiles;
  const unsigned lane = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  const unsigned c = (blockIdx.x - static_cast<unsigned>(slab) * tiles) * kColumns + lane;
  const std::size_t begin = slab * rows_per_slab;
  const std::size_t end = begin + rows_per_slab < rows ? begin + rows_per_slab : rows;
  float sum = 0.0f;
  if (c < channels)
    for (std::size_t i = begin + group; i < end; i += kGroups) sum += as_float(x[i * channels + c]);
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (group != 0 || c >= channels) return;
  for (int g = 1; g < kGroups; ++g) sum += partial[g * kColumns + lane];
  float* to = &sums[slab * channels + c];
  *to = accumulate ? *to + sum : sum;
}

std::size_t slabs_for(std::size_t rows) {
  const std::size_t slabs = ceil_div(rows, kRowsPerSlab);
  return slabs < kMostSlabs ? slabs : kMostSlabs;
}

template <class T>
void sum_columns(cudaStream_t stream, const T* x, std::size_t rows, std::size_t channels, std::size_t slabs,
                 float* sums, bool accumulate) {
  const std::size_t tiles = ceil_div(channels, kColumns);
  launch(column_sums_kernel<T>, dim3(static_cast<unsigned>(slabs * tiles)), kThreads, stream, x, rows,
         static_cast<unsigned>(channels), ceil_div(rows, slabs), sums, accumulate);
}

std::size_t channels_of(const Tensor& y) {
  return static_cast<std::size_t>(y.dim(1));
}

}  // namespace

void multiply(std::int64_t m, std::int64_t n, std::int64_t k, DType inputs, Operand a, Operand b, bool add,
              void* c, DType output, std::int64_t stride) {
  // cuBLAS counts by columns: it takes our matrices for their transposes, and computes c^T = op(b)^T op(a)^T.
  const float alpha = 1.0f, beta = add ? 1.0f : 0.0f;
  const int rows = as_int(n), columns = as_int(m), depth = as_int(k);
  const auto stored = [](std::int64_t apart, int contiguous) {
    return apart > 0 ? as_int(apart) : contiguous;
  };
  TOPKNOT_CUBLAS(cublasGemmEx(Context::current().cublas(), b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                              a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, rows, columns, depth, &alpha, b.data,
                              type_of(inputs), stored(b.stride, b.transposed ? depth : rows), a.data,
                              type_of(inputs), stored(a.stride, a.transposed ? columns : depth), &beta, c,
                              type_of(output), stored(stride, rows), CUBLAS_COMPUTE_32F,
                              CUBLAS_GEMM_DEFAULT));
}

void add_bias(cudaStream_t stream, void* y, bool bf16, const float* bias, std::size_t rows,
              std::size_t channels) {
  by_type(bf16, [&]<class T>(T) {
    constexpr std::size_t kSize = Piece<T>::kSize;
    const std::size_t pieces = rows * channels / kSize;
    if (pieces > 0 && channels % kSize == 0 && reinterpret_cast<std::uintptr_t>(y) % 16 == 0)
      return launch(bias_pieces_kernel<T>, grid_for(pieces, kThreads), kThreads, stream,
                    static_cast<Piece<T>*>(y), bias, pieces, static_cast<unsigned>(channels / kSize));
    if (rows * channels > 0)
      launch(bias_kernel<T>, grid_for(rows * channels, kThreads * kPerThread), kThreads, stream,
             static_cast<T*>(y), bias, rows * channels, static_cast<unsigned>(channels));
  });
}

void add_bias(Tensor& y, const Tensor& bias) {
  add_bias(compute_stream(), y.data(), is_bf16(y), bias.data(), elements(y) / channels_of(y), channels_of(y));
}

std::size_t column_sums_scratch(std::size_t rows, std::size_t channels) {
  const std::size_t slabs = slabs_for(rows);
  return slabs <= 1 ? 0 : slabs * channels;
}

void column_sums(cudaStream_t stream, const void* x, bool bf16, std::size_t rows, std::size_t channels,
                 float* scratch, float* sums, bool accumulate) {
  if (rows == 0 || channels == 0) return;
  const std::size_t slabs = slabs_for(rows);
  by_type(bf16, [&](auto type) {
    sum_columns(stream, static_cast<const decltype(type)*>(x), rows, channels, slabs,
                slabs <= 1 ? sums : scratch, slabs <= 1 && accumulate);
  });
  if (slabs > 1) sum_columns(stream, scratch, slabs, channels, 1, sums, accumulate);
}

void bias_gradient(const Tensor& dy, const GradientTarget& target) {
  if (!target.data) return;
  const std::size_t channels = channels_of(dy), rows = elements(dy) / channels;
  const DeviceArray<float> scratch(column_sums_scratch(rows, channels));
  column_sums(compute_stream(), dy.data(), is_bf16(dy), rows, channels, scratch.data(), target.data,
              target.accumulate);
}

}  // namespace topknot::cuda
