// A block of threads makes one tile of the average in shared memory: filled with zeros, the ranks' entries
// added one rank after the other, multiplied and written. A rank has a position once at most, so no two
// threads meet.
#include "compress/cuda/average_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr std::uint32_t kTile = 4096;  // floats; 16 KiB
constexpr int kRanks = kThreads / 2;   // whose entries are looked up at a time

// The first of `count` ascending indices that is not below `position`.
__device__ std::uint32_t lower_bound(const std::uint32_t* indices, std::uint32_t count,
                                     std::size_t position) {
  std::uint32_t begin = 0;
  while (count > 0) {
    const std::uint32_t half = count / 2;
    if (indices[begin + half] < position) {
      begin += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return begin;
}

__global__ void __launch_bounds__(kThreads)
    average_kernel(const StepStatus* status, DecodedEntries lists, std::size_t capacity, int ranks,
                   const float* weights, float factor, float* average, std::size_t n) {
  __shared__ float tile[kTile];
  __shared__ std::uint32_t bounds[kThreads];  // of each rank's entries in the tile: begin, end
  if (status->bad != 0) return;
  const std::size_t first = std::size_t{blockIdx.x} * kTile;
  for (std::uint32_t i = threadIdx.x; i < kTile; i += kThreads) tile[i] = 0;
  for (int from = 0; from < ranks; from += kRanks) {
    const int mine = from + static_cast<int>(threadIdx.x / 2);
    if (mine < ranks)
      bounds[threadIdx.x] = lower_bound(lists.indices + mine * capacity, lists.stats[mine].count,
                                        first + (threadIdx.x & 1) * kTile);
    __syncthreads();
    for (int rank = from; rank < ranks && rank < from + kRanks; ++rank) {
      const std::uint32_t begin = bounds[2 * (rank - from)], end = bounds[2 * (rank - from) + 1];
      if (begin == end) continue;
      const float weight = weights[rank];
      for (std::uint32_t i = begin + threadIdx.x; i < end; i += kThreads)
        tile[lists.indices[rank * capacity + i] - first] += weight * lists.values[rank * capacity + i];
      __syncthreads();
    }
    __syncthreads();
  }
  for (std::uint32_t i = threadIdx.x; i < kTile && first + i < n; i += kThreads)
    average[first + i] = ranks > 1 ? tile[i] * factor : tile[i];
}

}  // namespace

void average_entries(cudaStream_t stream, const StepStatus* status, const DecodedEntries& lists,
                     std::size_t capacity, int ranks, const float* weights, float* average, std::size_t n) {
  if (n > 0)
    launch(average_kernel, grid_for(n, kTile), kThreads, stream, status, lists, capacity, ranks, weights,
           1.0f / static_cast<float>(ranks), average, n);
}

}  // namespace topknot::cuda
