#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/label.h"
#include "nn/ops/cuda/loss_kernels.h"

namespace topknot::cuda {
namespace {

constexpr int kRowsPerBlock = kThreads / 32;  // one warp per row
constexpr std::size_t kPartsPerThread = 8;
constexpr std::size_t kMostParts = 1024;

__device__ inline double warp_sum(double value) {
  for (int by = 16; by > 0; by /= 2) value += __shfl_xor_sync(kAllLanes, value, by);
  return value;
}

__device__ inline float top_of(float a, float b) {
  return b > a ? b : a;  // a NaN comes through by the sum
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(const T* __restrict__ logits, std::int64_t rows, std::int64_t classes,
                         const std::int32_t* __restrict__ labels, float smoothing,
                         SoftmaxRow* __restrict__ softmax, double* __restrict__ loss) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x & 31;
  if (row >= rows) return;  // the whole warp
  const T* z = logits + row * classes;
  float top = as_float(z[lane < classes ? lane : 0]);
  for (std::int64_t c = lane + 32; c < classes; c += 32) top = top_of(top, as_float(z[c]));
  for (int by = 16; by > 0; by /= 2) top = top_of(top, __shfl_xor_sync(kAllLanes, top, by));
  double sum = 0, others = 0;
  for (std::int64_t c = lane; c < classes; c += 32) sum += expf(as_float(z[c]) - top);
  sum = warp_sum(sum);
  if (smoothing > 0) {
    for (std::int64_t c = lane; c < classes; c += 32) others += as_float(z[c]) - top;
    others = warp_sum(others) / static_cast<double>(classes);
  }
  if (lane != 0) return;
  const std::int32_t label = labels[row];
  if (label == kNoLabel) {
    loss[row] = 0;
    return;
  }
  const bool known = label >= 0 && label < classes;
  if (!known) sum = nan("");
  softmax[row] = {sum, top};
  const double hit = as_float(z[known ? label : 0]) - top;
  loss[row] = log(sum) - (smoothing > 0 ? (1.0 - smoothing) * hit + smoothing * others : hit);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(const T* __restrict__ logits, std::int64_t rows, std::int64_t classes,
                                  const std::int32_t* __restrict__ labels, float smoothing,
                                  const SoftmaxRow* __restrict__ softmax, const double* __restrict__ counted,
                                  const float* __restrict__ grad, T* __restrict__ dz) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / 32;
  if (row >= rows) return;
  const float scale = grad[0] / static_cast<float>(*counted);
  const std::int32_t label = labels[row];
  if (label == kNoLabel) {
    for (std::int64_t c = threadIdx.x & 31; c < classes; c += 32) dz[row * classes + c] = from_float<T>(0.0f);
    return;
  }
  const SoftmaxRow s = softmax[row];
  const float other = smoothing / static_cast<float>(classes), hit = 1.0f - smoothing + other;
  for (std::int64_t c = threadIdx.x & 31; c < classes; c += 32) {
    const float p = static_cast<float>(expf(as_float(logits[row * classes + c]) - s.top) / s.sum);
    dz[row * classes + c] = from_float<T>((p - (c == label ? hit : other)) * scale);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    hits_kernel(const T* __restrict__ logits, std::int64_t rows, std::int64_t classes,
                const std::int32_t* __restrict__ labels, int top, double* __restrict__ hit) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x & 31;
  if (row >= rows) return;
  const T* z = logits + row * classes;
  const std::int32_t label = labels[row];
  const bool known = label >= 0 && label < classes;
  const float at_label = as_float(z[known ? label : 0]);
  int before = 0;  // classes that come before the label
  for (std::int64_t c = lane; c < classes; c += 32) {
    const float v = as_float(z[c]);
    before += c < label ? !(v < at_label) : c > label && !(v <= at_label);
  }
  for (int by = 16; by > 0; by /= 2) before += __shfl_xor_sync(kAllLanes, before, by);
  if (lane == 0) hit[row] = known && before < top ? 1.0 : 0.0;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    squared_error_kernel(const T* __restrict__ y, const float* __restrict__ target, std::size_t n,
                         double* __restrict__ partial) {
  double sum = 0;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * kThreads) {
    const double d = static_cast<double>(as_float(y[i])) - static_cast<double>(target[i]);
    sum += d * d;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    squared_error_backward_kernel(const T* __restrict__ y, const float* __restrict__ target, std::size_t n,
                                  const float* __restrict__ grad, T* __restrict__ dy) {
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const float scale = 2.0f * grad[0] / static_cast<float>(n);
  dy[i] = from_float<T>((as_float(y[i]) - target[i]) * scale);
}

// One block.
__device__ inline double sum_of(const double* values, std::size_t n) {
  double sum = 0;
  for (std::size_t i = threadIdx.x; i < n; i += kThreads) sum += values[i];
  return block_sum(sum);
}
__global__ void __launch_bounds__(kThreads)
    mean_kernel(const double* values, std::size_t n, double by, float* out) {
  const double sum = sum_of(values, n);
  if (threadIdx.x == 0) *out = static_cast<float>(sum / by);
}
__global__ void __launch_bounds__(kThreads)
    mean_of_unmasked_kernel(const double* losses, const std::int32_t* labels, std::size_t rows,
                            double* counted, float* loss) {
  const double sum = sum_of(losses, rows);
  double unmasked = 0;
  for (std::size_t i = threadIdx.x; i < rows; i += kThreads) unmasked += labels[i] != kNoLabel;
  unmasked = block_sum(unmasked);
  if (threadIdx.x != 0) return;
  *counted = unmasked > 0 ? unmasked : 1.0;
  *loss = static_cast<float>(sum / *counted);
}
__global__ void __launch_bounds__(kThreads)
    add_sum_kernel(const double* values, std::size_t n, double* total) {
  const double sum = sum_of(values, n);
  if (threadIdx.x == 0) *total += sum;
}

dim3 row_grid(const Rows& r) {
  return grid_for(static_cast<std::size_t>(r.rows), kRowsPerBlock);
}

template <class T>
const T* data_of(const Rows& r) {
  return static_cast<const T*>(r.data);
}

}  // namespace

void cross_entropy_rows(cudaStream_t stream, const Rows& r, const std::int32_t* labels, float smoothing,
                        SoftmaxRow* softmax, double* loss) {
  by_type(r.bf16, [&](auto type) {
    using T = decltype(type);
    launch(cross_entropy_kernel<T>, row_grid(r), kThreads, stream, data_of<T>(r), r.rows, r.classes, labels,
           smoothing, softmax, loss);
  });
}

void cross_entropy_backward(cudaStream_t stream, const Rows& r, const std::int32_t* labels, float smoothing,
                            const SoftmaxRow* softmax, const double* counted, const float* grad, void* dz) {
  by_type(r.bf16, [&](auto type) {
    using T = decltype(type);
    launch(cross_entropy_backward_kernel<T>, row_grid(r), kThreads, stream, data_of<T>(r), r.rows, r.classes,
           labels, smoothing, softmax, counted, grad, static_cast<T*>(dz));
  });
}

void count_hits(cudaStream_t stream, const Rows& r, const std::int32_t* labels, int top, double* hit) {
  by_type(r.bf16, [&](auto type) {
    using T = decltype(type);
    launch(hits_kernel<T>, row_grid(r), kThreads, stream, data_of<T>(r), r.rows, r.classes, labels, top, hit);
  });
}

std::size_t squared_error_blocks(std::size_t n) {
  return grid_for(n, kThreads * kPartsPerThread, kMostParts).x;
}

void squared_error(cudaStream_t stream, bool bf16, const void* y, const float* target, std::size_t n,
                   double* partial) {
  by_type(bf16, [&](auto type) {
    using T = decltype(type);
    launch(squared_error_kernel<T>, static_cast<unsigned>(squared_error_blocks(n)), kThreads, stream,
           static_cast<const T*>(y), target, n, partial);
  });
}

void squared_error_backward(cudaStream_t stream, bool bf16, const void* y, const float* target, std::size_t n,
                            const float* grad, void* dy) {
  by_type(bf16, [&](auto type) {
    using T = decltype(type);
    launch(squared_error_backward_kernel<T>, grid_for(n, kThreads), kThreads, stream,
           static_cast<const T*>(y), target, n, grad, static_cast<T*>(dy));
  });
}

void mean_of(cudaStream_t stream, const double* values, std::size_t n, double by, float* out) {
  launch(mean_kernel, 1, kThreads, stream, values, n, by, out);
}
void mean_of_unmasked(cudaStream_t stream, const double* losses, const std::int32_t* labels, std::size_t rows,
                      double* counted, float* loss) {
  launch(mean_of_unmasked_kernel, 1, kThreads, stream, losses, labels, rows, counted, loss);
}
void add_sum(cudaStream_t stream, const double* values, std::size_t n, double* total) {
  launch(add_sum_kernel, 1, kThreads, stream, values, n, total);
}

}  // namespace topknot::cuda
