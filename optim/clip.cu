#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/device.h"
#include "optim/clip.h"

namespace topknot::cuda {
namespace {

constexpr int kLanes = static_cast<int>(kClipLanes);
constexpr int kGroups = kThreads / kLanes;  // blocks of values that a block of threads sums
constexpr int kAhead = 16;                  // loads under way in a thread

// A block of values, one of kClipBlock or its vector's last.
struct Block {
  std::uint32_t vector;
  float* values;
  std::size_t size;
};

__device__ Block block_of(const ClipVectors& vectors, std::uint32_t block) {
  std::uint32_t low = 0, high = vectors.count;  // first_block[low] <= block < first_block[high]
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (vectors.first_block[middle] <= block ? low : high) = middle;
  }
  const std::size_t begin = (block - vectors.first_block[low]) * kClipBlock, left = vectors.size[low] - begin;
  return {low, vectors.data[low] + begin, left < kClipBlock ? left : kClipBlock};
}

// A thread a lane. Sums in the CPU's order: a thread's additions wait for one another, its loads do not.
__global__ void __launch_bounds__(kThreads) block_sums_kernel(const ClipVectors vectors, double* sums) {
  await_previous();
  __shared__ double lanes[kThreads];
  const std::uint32_t group = blockIdx.x * kGroups + threadIdx.x / kLanes;
  const bool any = group < vectors.blocks();
  const Block block = any ? block_of(vectors, group) : Block{0, nullptr, 0};
  const float* const values = block.values;
  const std::size_t begin = threadIdx.x % kLanes, end = block.size;
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
  if (begin != 0 || !any) return;
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[threadIdx.x + lane];
  sums[group] = total;
}

// One block, a warp a vector: the lanes fetch what all of them add up in order.
__global__ void __launch_bounds__(kThreads)
    totals_kernel(const ClipVectors vectors, const double* sums, double* memory, bool add) {
  await_previous();
  __shared__ double totals[ClipVectors::kMost];
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t i = threadIdx.x / 32; i < vectors.count; i += kThreads / 32) {
    const std::uint32_t end = vectors.first_block[i + 1];
    double total = 0;
    for (std::uint32_t from = vectors.first_block[i]; from < end; from += 32) {
      const double fetched = from + lane < end ? sums[from + lane] : 0;
      const std::uint32_t count = end - from < 32 ? end - from : 32;
      for (std::uint32_t j = 0; j < count; ++j) total += __shfl_sync(kAllLanes, fetched, static_cast<int>(j));
    }
    if (lane == 0) totals[i] = memory[1 + i] = total;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = add ? memory[0] : 0;
  for (std::uint32_t i = 0; i < vectors.count; ++i) total += totals[i];
  memory[0] = total;
}

__global__ void __launch_bounds__(kThreads)
    scale_kernel(const ClipVectors vectors, const double* memory, bool each, double max_norm) {
  await_previous();
  const Block block = block_of(vectors, blockIdx.x);
  const double factor = clip_factor_of(sqrt(memory[each ? 1 + block.vector : 0]), max_norm);
  if (factor == 1.0) return;
  const float by = static_cast<float>(factor);
#pragma unroll 4
  for (std::size_t i = threadIdx.x; i < block.size; i += kThreads) block.values[i] *= by;
}

__global__ void gradient_scale_kernel(const double* sum, double max_norm, StepParameters* parameters) {
  await_previous();
  parameters->gradient_scale = clip_factor_of(sqrt(*sum), max_norm);
}

void clip_sum_of_squares(const ClipVectors& vectors, double* memory, bool add) {
  double* const sums = memory + clip_doubles(0);
  if (vectors.blocks() > 0)
    launch(block_sums_kernel, grid_for(vectors.blocks(), kGroups), kThreads, compute_stream(), vectors, sums);
  launch(totals_kernel, dim3(1), kThreads, compute_stream(), vectors, sums, memory, add);
}

void clip_scale(const ClipVectors& vectors, const double* memory, bool each, double max_norm) {
  if (vectors.blocks() > 0)
    launch(scale_kernel, dim3(vectors.blocks()), kThreads, compute_stream(), vectors, memory, each, max_norm);
}

void clip_set_gradient_scale(const double* memory, double max_norm, StepParameters* parameters) {
  launch(gradient_scale_kernel, dim3(1), dim3(1), compute_stream(), memory, max_norm, parameters);
}

const bool clip_kernels =
    add_cuda_kernels<ClipKernels>({clip_sum_of_squares, clip_scale, clip_set_gradient_scale});

}  // namespace
}  // namespace topknot::cuda
