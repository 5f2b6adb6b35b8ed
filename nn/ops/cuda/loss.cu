// The losses on a GPU: a scalar in its memory, which the host does not wait for. Rows and outputs are float
// or bfloat16; losses are taken in double, in a fixed order. A NaN comes through. Sizes are positive.

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/op_tools.h"

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

dim3 row_grid(const Tensor& rows) {
  return grid_for(static_cast<std::size_t>(rows.dim(0)), kRowsPerBlock);
}

// A row's softmax for the backward pass: exp(z - top) / sum. A label that is no class makes all of it NaN.
struct SoftmaxRow {
  double sum;
  float top;
};

// loss[i] = -sum_c t_c log softmax(z_i)[c], t as softmax_cross_entropy() has it; 0 if the row is masked
template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(const T* __restrict__ logits, std::int64_t rows, std::int64_t classes,
                         const std::int32_t* __restrict__ labels, float smoothing,
                         SoftmaxRow* __restrict__ softmax, double* __restrict__ loss) {
  await_previous();
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

// One block.
__device__ inline double sum_of(const double* values, std::size_t n) {
  double sum = 0;
  for (std::size_t i = threadIdx.x; i < n; i += kThreads) sum += values[i];
  return block_sum(sum);
}

// *counted = rows that are not masked, at least 1; *loss = the sum of `losses`, a row each, over that
__global__ void __launch_bounds__(kThreads)
    mean_of_unmasked_kernel(const double* losses, const std::int32_t* labels, std::size_t rows,
                            double* counted, float* loss) {
  await_previous();
  const double sum = sum_of(losses, rows);
  double unmasked = 0;
  for (std::size_t i = threadIdx.x; i < rows; i += kThreads) unmasked += labels[i] != kNoLabel;
  unmasked = block_sum(unmasked);
  if (threadIdx.x != 0) return;
  *counted = unmasked > 0 ? unmasked : 1.0;
  *loss = static_cast<float>(sum / *counted);
}

struct Softmax {
  DeviceArray<SoftmaxRow> rows;
  const std::int32_t* labels;
  DeviceArray<double> counted{1};  // rows that are not masked
};

OpState forward(const Tensor& logits, std::span<const std::int32_t> labels, float smoothing, Tensor& loss) {
  const std::size_t n = labels.size();
  const auto softmax = std::make_shared<Softmax>(Softmax{DeviceArray<SoftmaxRow>(n), labels.data()});
  const DeviceArray<double> losses(n);
  by_type(logits, [&]<class T>(T) {
    launch_in_turn(cross_entropy_kernel<T>, row_grid(logits), kThreads, compute_stream(), logits.as<T>(),
                   logits.dim(0), logits.dim(1), labels.data(), smoothing, softmax->rows.data(),
                   losses.data());
  });
  launch_in_turn(mean_of_unmasked_kernel, 1, kThreads, compute_stream(), losses.data(), labels.data(), n,
                 softmax->counted.data(), loss.data());
  return softmax;
}

// dz = (softmax(z) - t) grad[0] / counted
template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(const T* __restrict__ logits, std::int64_t rows, std::int64_t classes,
                                  const std::int32_t* __restrict__ labels, float smoothing,
                                  const SoftmaxRow* __restrict__ softmax, const double* __restrict__ counted,
                                  const float* __restrict__ grad, T* __restrict__ dz) {
  await_previous();
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

void backward(const Tensor& logits, const OpState& state, float smoothing, const Tensor& grad, Tensor& dz) {
  const auto& softmax = state_as<Softmax>(state);
  by_type(logits, [&]<class T>(T) {
    launch_in_turn(cross_entropy_backward_kernel<T>, row_grid(logits), kThreads, compute_stream(),
                   logits.as<T>(), logits.dim(0), logits.dim(1), softmax.labels, smoothing,
                   softmax.rows.data(), softmax.counted.data(), grad.data(), dz.as<T>());
  });
}

// hit[i] = 1 if the row's label is among its `top` greatest classes, as count_correct() has it, else 0
template <class T>
__global__ void __launch_bounds__(kThreads)
    hits_kernel(const T* __restrict__ logits, std::int64_t rows, std::int64_t classes,
                const std::int32_t* __restrict__ labels, int top, double* __restrict__ hit) {
  await_previous();
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

__global__ void __launch_bounds__(kThreads)
    add_sum_kernel(const double* values, std::size_t n, double* total) {
  await_previous();
  const double sum = sum_of(values, n);
  if (threadIdx.x == 0) *total += sum;
}

void count_correct(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum) {
  const DeviceArray<double> hits(labels.size());
  by_type(logits, [&]<class T>(T) {
    launch_in_turn(hits_kernel<T>, row_grid(logits), kThreads, compute_stream(), logits.as<T>(),
                   logits.dim(0), logits.dim(1), labels.data(), top, hits.data());
  });
  launch_in_turn(add_sum_kernel, 1, kThreads, compute_stream(), hits.data(), hits.size(), sum);
}

// (y - target)^2 summed by blocks.
template <class T>
__global__ void __launch_bounds__(kThreads)
    squared_error_kernel(const T* __restrict__ y, const float* __restrict__ target, std::size_t n,
                         double* __restrict__ partial) {
  await_previous();
  double sum = 0;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * kThreads) {
    const double d = static_cast<double>(as_float(y[i])) - static_cast<double>(target[i]);
    sum += d * d;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

void squared_error_forward(const Tensor& y, const Tensor& target, Tensor& loss) {
  const std::size_t n = elements(y);
  const dim3 grid = grid_for(n, kThreads * kPartsPerThread, kMostParts);
  const DeviceArray<double> partial(grid.x);
  by_type(y, [&]<class T>(T) {
    launch_in_turn(squared_error_kernel<T>, grid, kThreads, compute_stream(), y.as<T>(), target.data(), n,
                   partial.data());
  });
  mean_of(compute_stream(), partial.data(), partial.size(), static_cast<double>(n), loss.data());
}

// dy = (y - target) (2 grad[0] / n)
template <class T>
__global__ void __launch_bounds__(kThreads)
    squared_error_backward_kernel(const T* __restrict__ y, const float* __restrict__ target, std::size_t n,
                                  const float* __restrict__ grad, T* __restrict__ dy) {
  const std::size_t i = awaited_index();
  if (i >= n) return;
  const float scale = 2.0f * grad[0] / static_cast<float>(n);
  dy[i] = from_float<T>((as_float(y[i]) - target[i]) * scale);
}

void squared_error_backward(const Tensor& y, const Tensor& target, const Tensor& grad, Tensor& dy) {
  const std::size_t n = elements(y);
  by_type(y, [&]<class T>(T) {
    launch_in_turn(squared_error_backward_kernel<T>, grid_for(n, kThreads), kThreads, compute_stream(),
                   y.as<T>(), target.data(), n, grad.data(), dy.as<T>());
  });
}

__global__ void __launch_bounds__(kThreads)
    mean_kernel(const double* values, std::size_t n, double by, float* out) {
  await_previous();
  const double sum = sum_of(values, n);
  if (threadIdx.x == 0) *out = static_cast<float>(sum / by);
}

const bool cross_entropy_registered = add_cuda_kernels<CrossEntropyKernels>(
    {.forward = forward, .backward = backward, .count_correct = count_correct});
const bool squared_error_registered = add_cuda_kernels<SquaredErrorKernels>(
    {.forward = squared_error_forward, .backward = squared_error_backward});

}  // namespace

void mean_of(cudaStream_t stream, const double* values, std::size_t n, double by, float* out) {
  launch_in_turn(mean_kernel, 1, kThreads, stream, values, n, by, out);
}

}  // namespace topknot::cuda
