#include "compress/cuda/device_step_kernels.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// One block of threads.
__global__ void __launch_bounds__(kThreads)
    join_kernel(SelectRanges ranges, JoinedList joined, StepStatus* status) {
  __shared__ float lowest[kThreads];
  std::uint32_t count = 0, over = 0;
  float threshold = float_of(0x7F800000);
  int broken = 0;
  for (std::uint32_t first = 0; first < ranges.count; first += kThreads) {
    const std::uint32_t r = first + threadIdx.x;
    SelectStats stats;
    if (r < ranges.count) {
      stats = *ranges.range[r].stats;
      over += stats.over;
      if (stats.finite == 0) broken = 1;
      if (stats.finite != 0 && stats.threshold < threshold) threshold = stats.threshold;
    }
    std::uint32_t total = 0;
    const std::uint32_t start = count + block_exclusive_sum(stats.count, total);
    if (r < ranges.count) joined.starts[r] = start;
    count += total;
  }
  over = block_sum(over);
  lowest[threadIdx.x] = threshold;
  broken = __syncthreads_or(broken);
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i)
    if (lowest[i] < threshold) threshold = lowest[i];
  *joined.count = broken ? 0 : count;
  *joined.finite = broken ? 0 : 1;
  status->selected += broken ? 0 : count;
  status->over_capacity += over;
  status->threshold = broken || ranges.count == 0 ? 0.0 : static_cast<double>(threshold);
}

__global__ void __launch_bounds__(kThreads)
    concatenate_kernel(SelectRanges ranges, JoinedList joined, std::uint32_t* indices, float* values) {
  if (*joined.finite == 0) return;
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const std::uint32_t count = range.stats->count, start = joined.starts[block.range];
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    indices[start + i] = range.taken.indices[i] + static_cast<std::uint32_t>(range.begin);
    values[start + i] = range.taken.values[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    take_own_kernel(SelectRanges ranges, JoinedList joined, const StepParameters* step, const float* decoded,
                    std::size_t capacity, float* list, float* by_slot) {
  if (*joined.finite == 0) return;
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const float* const own = decoded + static_cast<std::size_t>(step->rank) * capacity;
  const std::uint32_t count = range.stats->count, start = joined.starts[block.range];
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    const float value = own[start + i];
    list[start + i] = value;
    by_slot[range.slot + i] = value;
  }
}

// One block of threads; thread 0 adds in rank order, as the CPU does.
__global__ void __launch_bounds__(kThreads)
    judge_kernel(const DecodedStats* stats, int ranks, const float* weights, const StepParameters* step,
                 float* kept_weights, StepStatus* status) {
  __shared__ double terms[kThreads];  // negative: not finite, or damaged
  double bound = 0;
  int bad_rank = -1;
  for (int first = 0; first < ranks; first += kThreads) {
    const int mine = first + static_cast<int>(threadIdx.x);
    if (mine < ranks) {
      const DecodedStats found = stats[mine];
      const float weight = weights[mine];
      kept_weights[mine] = weight;
      terms[threadIdx.x] = found.finite == 0 || found.damaged != 0
                               ? -1.0
                               : static_cast<double>(weight) * static_cast<double>(float_of(found.largest));
    }
    __syncthreads();
    for (int i = 0; threadIdx.x == 0 && i < kThreads && first + i < ranks; ++i) {
      if (terms[i] < 0 && bad_rank < 0) bad_rank = first + i;
      bound += terms[i];
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  kept_weights[ranks] = weights[step->rank];
  if (bad_rank >= 0 && (status->bad_rank < 0 || bad_rank < status->bad_rank)) status->bad_rank = bad_rank;
  if (bad_rank >= 0 || !(bound <= static_cast<double>(float_of(0x7F7FFFFF)))) status->bad = 1;
}

}  // namespace

void join_ranges(cudaStream_t stream, const SelectRanges& ranges, const JoinedList& joined,
                 StepStatus* status) {
  launch(join_kernel, dim3(1), kThreads, stream, ranges, joined, status);
}

void concatenate(cudaStream_t stream, const SelectRanges& ranges, const JoinedList& joined,
                 std::uint32_t* indices, float* values) {
  launch(concatenate_kernel, ranges.shares.count, kThreads, stream, ranges, joined, indices, values);
}

void take_own(cudaStream_t stream, const SelectRanges& ranges, const JoinedList& joined,
              const StepParameters* step, const float* decoded, std::size_t capacity, float* list,
              float* by_slot) {
  if (ranges.count > 0)
    launch(take_own_kernel, ranges.shares.count, kThreads, stream, ranges, joined, step, decoded, capacity,
           list, by_slot);
}

void judge(cudaStream_t stream, const DecodedStats* stats, int ranks, const float* weights,
           const StepParameters* step, float* kept_weights, StepStatus* status) {
  launch(judge_kernel, dim3(1), kThreads, stream, stats, ranks, weights, step, kept_weights, status);
}

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

// A block of threads makes one tile of the average in shared memory: filled with zeros, the ranks' entries
// added one rank after the other, multiplied and written. A rank has a position once at most, so no two
// threads meet.
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
