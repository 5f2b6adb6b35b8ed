#include "nn/ops/cuda/conv_layout.h"

#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kPerThread = 4;
// Column sums: a block sums kColumns columns of a slab of rows, kGroups rows at a time.
constexpr int kColumns = 32, kGroups = kThreads / kColumns;
constexpr std::size_t kRowsPerSlab = 256, kMostSlabs = 1024;

// In the order of the filter, so that a warp writes in one piece; a weight is small enough for the caches to make up
// for the strided reads.
template <class T>
__global__ __launch_bounds__(kThreads) void filter_kernel(const float* weight, T* filter, std::size_t n,
                                                          unsigned in, unsigned taps) {
  std::size_t at = std::size_t{blockIdx.x} * kThreads * kPerThread + threadIdx.x;
  for (int j = 0; j < kPerThread; ++j, at += kThreads) {
    if (at >= n) return;
    const std::size_t row = at / in;
    const std::size_t i = at - row * in, o = row / taps, tap = row - o * taps;
    filter[at] = from_float<T>(weight[(o * in + i) * taps + tap]);
  }
}

template <class T>
__global__ __launch_bounds__(kThreads) void weight_kernel(const T* filter, float* weight, bool accumulate,
                                                          std::size_t n, unsigned in, unsigned taps) {
  std::size_t at = std::size_t{blockIdx.x} * kThreads * kPerThread + threadIdx.x;
  for (int j = 0; j < kPerThread; ++j, at += kThreads) {
    if (at >= n) return;
    const std::size_t row = at / taps;
    const std::size_t tap = at - row * taps, o = row / in, i = row - o * in;
    const float value = as_float(filter[(o * taps + tap) * in + i]);
    weight[at] = accumulate ? weight[at] + value : value;
  }
}

// One division per thread: the elements of a thread are kThreads apart, and so are their channels.
template <class T>
__global__ __launch_bounds__(kThreads) void bias_kernel(T* y, const float* bias, std::size_t n,
                                                        unsigned channels) {
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

// Block: slab s of column tile t, at s * tiles + t. sums is [slabs, channels].
template <class T>
__global__ __launch_bounds__(kThreads) void column_sums_kernel(const T* x, std::size_t rows,
                                                               unsigned channels, std::size_t rows_per_slab,
                                                               float* sums, bool accumulate) {
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

dim3 blocks(std::size_t n) {
  return grid_for(n, kThreads * kPerThread);
}

}  // namespace

void filter_from_weight(cudaStream_t stream, const float* weight, void* filter, bool bf16,
                        FilterShape shape) {
  const std::size_t n = shape.size();
  const auto in = static_cast<unsigned>(shape.in), taps = static_cast<unsigned>(shape.taps);
  if (n == 0) return;
  if (bf16)
    launch(filter_kernel<__nv_bfloat16>, blocks(n), kThreads, stream, weight,
           static_cast<__nv_bfloat16*>(filter), n, in, taps);
  else
    launch(filter_kernel<float>, blocks(n), kThreads, stream, weight, static_cast<float*>(filter), n, in,
           taps);
}

void weight_from_filter(cudaStream_t stream, const void* filter, bool bf16, float* weight, bool accumulate,
                        FilterShape shape) {
  const std::size_t n = shape.size();
  const auto in = static_cast<unsigned>(shape.in), taps = static_cast<unsigned>(shape.taps);
  if (n == 0) return;
  if (bf16)
    launch(weight_kernel<__nv_bfloat16>, blocks(n), kThreads, stream,
           static_cast<const __nv_bfloat16*>(filter), weight, accumulate, n, in, taps);
  else
    launch(weight_kernel<float>, blocks(n), kThreads, stream, static_cast<const float*>(filter), weight,
           accumulate, n, in, taps);
}

void add_bias(cudaStream_t stream, void* y, bool bf16, const float* bias, std::size_t rows,
              std::size_t channels) {
  const std::size_t n = rows * channels;
  const auto c = static_cast<unsigned>(channels);
  if (n == 0) return;
  if (bf16)
    launch(bias_kernel<__nv_bfloat16>, blocks(n), kThreads, stream, static_cast<__nv_bfloat16*>(y), bias, n,
           c);
  else
    launch(bias_kernel<float>, blocks(n), kThreads, stream, static_cast<float*>(y), bias, n, c);
}

std::size_t column_sums_scratch(std::size_t rows, std::size_t channels) {
  const std::size_t slabs = slabs_for(rows);
  return slabs <= 1 ? 0 : slabs * channels;
}

void column_sums(cudaStream_t stream, const void* x, bool bf16, std::size_t rows, std::size_t channels,
                 float* scratch, float* sums, bool accumulate) {
  if (rows == 0 || channels == 0) return;
  const std::size_t slabs = slabs_for(rows);
  float* first = slabs <= 1 ? sums : scratch;
  const bool add = slabs <= 1 && accumulate;
  if (bf16)
    sum_columns(stream, static_cast<const __nv_bfloat16*>(x), rows, channels, slabs, first, add);
  else
    sum_columns(stream, static_cast<const float*>(x), rows, channels, slabs, first, add);
  if (slabs > 1) sum_columns(stream, scratch, slabs, channels, 1, sums, accumulate);
}

}  // namespace topknot::cuda
