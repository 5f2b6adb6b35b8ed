// CUDA counterpart of cyclic: the same entries, selected without the host.
#include <topknot_kernel.h>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "compress/select/selector.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// Blocks share a range's entries. What they write is in `range`, in GPU memory.
__global__ void take_kernel(SelectRanges ranges, const StepParameters* step, std::size_t phase,
                            const float* group) {
  await_previous();
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

// For all selection ranges of a group: each launch serves all of them.
class DeviceCyclic final : public DeviceSelector {
 public:
  DeviceCyclic(const CompressOptions& options, const std::vector<DeviceRange>&) {
    // The key that cyclic.cpp declares.
    phase_ = static_cast<std::size_t>(options.get<int>(selectors().options("cyclic").front()));
  }

  std::size_t capacity(std::size_t n, double density) const override { return target_count(density, n); }
  // The pass that makes u lists nothing of a finite vector; it finds a NaN or an infinity.
  std::size_t list_limit(std::size_t, double) const override { return 1; }

  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* step) override {
    accumulate_and_list(stream, ranges, accumulate);
    launch(take_kernel, ranges.shares.count, kThreads, stream, ranges, step, phase_, accumulate.u);
    join_taken(stream, ranges);
  }

 private:
  std::size_t phase_;
};

const bool cyclic_registered = add_device_selector<DeviceCyclic>("cyclic");

}  // namespace
}  // namespace topknot::cuda
