#include "compress/select/cuda/gpu_tiles.h"
#include "compress/select/cuda/topk_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// A thread per range.

__global__ void topk_begin_kernel(SelectRanges ranges, TopKState* states, const StepParameters* parameters) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  TopKState& state = states[r];
  state.k = static_cast<std::uint32_t>(density_count(range.density(*parameters), range.n));
  ranges.above[r] = state.carried.above(state.k == range.n);
}

__global__ void topk_decide_kernel(SelectRanges ranges, TopKState* states) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  TopKState& state = states[r];
  const ListStats found = *range.list.stats;
  const std::uint32_t k = state.k < range.taken.capacity ? state.k : range.taken.capacity;
  state.list = list_state(found.count <= list_limit(k) && found.count <= range.list.limit, found.count, k);
  state.updates_bound = found.finite && k < range.n;
  Choice choice;
  choice.skip = !found.finite;
  choice.whole = state.list != ListState::good;
  choice.k = k;
  ranges.choices[r] = choice;
  range.stats->count = found.finite ? k : 0;
  range.stats->finite = found.finite;
  range.stats->over = 0;
  range.stats->threshold = 0;  // until the k-th magnitude is known
}

__global__ void topk_commit_kernel(SelectRanges ranges, TopKState* states, const StepStatus* status) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count || status->bad || !states[r].updates_bound) return;
  states[r].carried = states[r].carried.after(ranges.choices[r].kth, states[r].list);
}

__global__ void threshold_begin_kernel(SelectRanges ranges, std::uint32_t* counts,
                                       const StepParameters* parameters, double threshold) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const double density = ranges.range[r].density(*parameters);
  counts[r] = static_cast<std::uint32_t>(density_count(density, ranges.range[r].n));
  ranges.above[r] = density >= 1 ? -1 : key_below(threshold);
}

__global__ void threshold_decide_kernel(SelectRanges ranges, const std::uint32_t* counts, double threshold,
                                        double multiple) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  const ListStats found = *range.list.stats;
  const MagnitudeKey above = ranges.above[r];
  Choice choice;
  std::uint32_t kept = 0, over = 0;
  choose_within(multiple, counts[r], found.finite ? found.count : 0, above, choice, kept, over);
  choice.whole = found.count > range.list.limit;
  ranges.choices[r] = choice;
  range.stats->count = kept < range.taken.capacity ? kept : range.taken.capacity;
  range.stats->finite = found.finite;
  range.stats->over = over;
  range.stats->threshold = found.finite && above >= 0 ? static_cast<float>(threshold) : 0.0f;
}

}  // namespace

void topk_select(cudaStream_t stream, const SelectRanges& ranges, TopKState* states,
                 const Accumulate& accumulate, const StepParameters* parameters) {
  launch(topk_begin_kernel, thread_per_range(ranges), kThreads, stream, ranges, states, parameters);
  accumulate_and_list(stream, ranges, accumulate);
  launch(topk_decide_kernel, thread_per_range(ranges), kThreads, stream, ranges, states);
  take_largest(stream, ranges, accumulate.u);
}

void topk_commit(cudaStream_t stream, const SelectRanges& ranges, TopKState* states,
                 const StepStatus* status) {
  launch(topk_commit_kernel, thread_per_range(ranges), kThreads, stream, ranges, states, status);
}

void threshold_select(cudaStream_t stream, const SelectRanges& ranges, std::uint32_t* counts,
                      double threshold, double multiple, const Accumulate& accumulate,
                      const StepParameters* parameters) {
  launch(threshold_begin_kernel, thread_per_range(ranges), kThreads, stream, ranges, counts, parameters,
         threshold);
  accumulate_and_list(stream, ranges, accumulate);
  launch(threshold_decide_kernel, thread_per_range(ranges), kThreads, stream, ranges, counts, threshold,
         multiple);
  take_largest(stream, ranges, accumulate.u);
}

}  // namespace topknot::cuda
