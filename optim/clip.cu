#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/device.h"
#include "optim/clip.h"

namespace topknot::cuda {
namespace {

constexpr int kLanes = static_cast<int>(kClipLanes);
constexpr int kGroups = kThreads / kLanes;  // blocks of values that a block of threads sums
constexpr int kAhead = 16;                  // loads under way in a thread

// A thread a lane. The sums are the CPU's in its order, so a thread's additions wait for one another; its
// loads do not.
__global__ void __launch_bounds__(kThreads)
    block_sums_kernel(const float* values, std::size_t n, double* sums) {
  __shared__ double lanes[kThreads];
  const std::size_t group = std::size_t{blockIdx.x} * kGroups + threadIdx.x / kLanes;
  const std::size_t begin = group * kClipBlock + threadIdx.x % kLanes;
  std::size_t end = (group + 1) * kClipBlock;
  if (end > n) end = n;
  double sum = 0;
  std::size_t i = begin;
  for (; i + (kAhead - 1) * kLanes < end; i += kAhead * kLanes) {
    float ahead[kAhead];
    for (int j = 0; j < kAhead; ++j) ahead[j] = values[i + j * kLanes];
    for (int j = 0; j < kAhead; ++j) sum += static_cast<double>(ahead[j]) * ahead[j];
  }
  for (; i < end; i += kLanes) sum += static_cast<double>(values[i]) * values[i];
  lanes[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x % kLanes != 0 || group * kClipBlock >= n) return;
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[threadIdx.x + lane];
  sums[group] = total;
}

// One block: the others fetch what the first thread adds up in order.
__global__ void __launch_bounds__(kThreads)
    total_kernel(const double* sums, std::size_t count, double* sum, bool add) {
  __shared__ double fetched[kThreads];
  double total = 0;
  for (std::size_t begin = 0; begin < count; begin += kThreads) {
    if (begin + threadIdx.x < count) fetched[threadIdx.x] = sums[begin + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0)
      for (std::size_t i = 0; i < kThreads && begin + i < count; ++i) total += fetched[i];
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum = add ? *sum + total : total;
}

__global__ void __launch_bounds__(kThreads)
    scale_kernel(float* values, std::size_t n, const double* sum, double max_norm) {
  const double factor = clip_factor_of(sqrt(*sum), max_norm);
  if (factor == 1.0) return;
  const float by = static_cast<float>(factor);
  std::size_t i = std::size_t{blockIdx.x} * kThreads * 4 + threadIdx.x;
  for (int j = 0; j < 4; ++j, i += kThreads)
    if (i < n) values[i] *= by;
}

__global__ void gradient_scale_kernel(const double* sum, double max_norm, StepParameters* parameters) {
  parameters->gradient_scale = clip_factor_of(sqrt(*sum), max_norm);
}

void clip_sum_of_squares(const float* values, std::size_t n, double* blocks, double* sum, bool add) {
  const std::size_t count = ceil_div(n, kClipBlock);
  if (n > 0)
    launch(block_sums_kernel, grid_for(count, kGroups), kThreads, compute_stream(), values, n, blocks);
  launch(total_kernel, dim3(1), kThreads, compute_stream(), blocks, count, sum, add);
}

void clip_scale(float* values, std::size_t n, const double* sum, double max_norm) {
  if (n > 0)
    launch(scale_kernel, grid_for(n, kThreads * 4), kThreads, compute_stream(), values, n, sum, max_norm);
}

void clip_set_gradient_scale(const double* sum, double max_norm, StepParameters* parameters) {
  launch(gradient_scale_kernel, dim3(1), dim3(1), compute_stream(), sum, max_norm, parameters);
}

const RegisterKernels<ClipKernels> clip_kernels(DeviceKind::cuda,
                                                {clip_sum_of_squares, clip_scale, clip_set_gradient_scale});

}  // namespace
}  // namespace topknot::cuda
