#include "compress/select/cuda/gpu_select.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// Blocks share a range's entries. What they write is in `range`, in GPU memory.
__global__ void take_kernel(SelectRanges ranges, const StepParameters* step, std::size_t phase,
                            const float* group) {
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const std::size_t n = range.n, k = density_count(range.density(*step), n), stride = (n + k - 1) / k;
  const std::size_t first = (static_cast<std::size_t>(step->step) + phase) % stride;
  const std::uint32_t finite = range.list.stats->finite;
  const std::size_t count = finite ? (n - first + stride - 1) / stride : 0;
  if (block.index == 0 && threadIdx.x == 0) {
    *range.stats = {static_cast<std::uint32_t>(count), finite, 0, 0};
  }
  for (std::size_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    range.taken.indices[i] = static_cast<std::uint32_t>(first + i * stride);
    range.taken.values[i] = group[range.begin + first + i * stride];
  }
}

}  // namespace

void cyclic_take(cudaStream_t stream, const SelectRanges& ranges, const StepParameters* step,
                 std::size_t phase, const float* u) {
  launch(take_kernel, ranges.shares.count, kThreads, stream, ranges, step, phase, u);
}

}  // namespace topknot::cuda
