#include "compress/select/cuda/regtopk_kernels.h"

#include "compress/select/cuda/gpu_tiles.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

__device__ float score_of(const RegTopKScore& rule, const RegTopKLast& last, std::uint32_t i, float u,
                          double weight) {
  return rule(u, weight, last.own[i], last.surplus[i], magnitude_of(kLargestFinite));
}

// A thread per range.
__global__ void plan_kernel(RegTopKScore rule, SelectRanges ranges, RegTopKWork work,
                            const StepParameters* parameters) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  RegTopKControl& c = work.controls[r];
  const std::uint32_t k = static_cast<std::uint32_t>(density_count(range.density(*parameters), range.n));
  const std::uint32_t room = work.last[r].capacity;
  const std::uint32_t capacity = range.taken.capacity < room ? range.taken.capacity : room;
  c.k = k < capacity ? k : capacity;
  c.all = c.k == range.n;
  c.fell_back = false;
  c.next_bound = c.bound;
  c.enough = c.blocks_done = 0;
  c.above = c.bound.above(c.all);
  ranges.above[r] = rule.listed_above(c.bound, c.all);
}

__device__ void judge(RegTopKControl& c, const SelectRange& range, Choice& choice) {
  const ListStats found = *range.list.stats;
  range.stats->finite = found.finite;
  range.stats->over = 0;
  range.stats->threshold = 0;
  range.stats->count = found.finite ? c.k : 0;
  choice = Choice();
  choice.skip = !found.finite;
  choice.k = c.k;
  choice.own_threshold = 1;  // the k-th magnitude is a score
  // Where all are sent the bound stays as it is.
  c.list = c.all ? ListState::good : list_state(found.count <= range.list.limit, c.enough, c.k);
  c.fell_back = c.list != ListState::good;
  choice.whole = c.all || c.fell_back;
}

__global__ void __launch_bounds__(kThreads)
    judge_kernel(RegTopKScore rule, SelectRanges ranges, RegTopKWork work) {
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const EntryList list = range.list;
  const RegTopKLast last = work.last[block.range];
  RegTopKControl* const control = work.controls + block.range;
  const std::uint32_t count = list.stats->count, known = control->last;
  const double weight = control->weight;
  const MagnitudeKey above = control->above;
  std::uint32_t enough = 0;
  if (!control->all && count <= list.limit)
    for (std::size_t i = std::size_t{block.index} * kThreads + threadIdx.x; i < count;
         i += std::size_t{block.count} * kThreads) {
      const std::uint32_t index = list.indices[i];
      float value = list.values[i];
      std::uint32_t low = 0, high = known;  // the first of the last entries that is not before it
      while (low < high) {
        const std::uint32_t middle = low + (high - low) / 2;
        if (last.indices[middle] < index)
          low = middle + 1;
        else
          high = middle;
      }
      if (low < known && last.indices[low] == index) {
        value = score_of(rule, last, low, value, weight);
        list.values[i] = value;
      }
      enough += key_of(value) > above;
    }
  enough = block_sum(enough);
  if (threadIdx.x != 0) return;
  if (enough > 0) atomicAdd(&control->enough, enough);
  __threadfence();
  if (atomicAdd(&control->blocks_done, 1u) != block.count - 1) return;
  __threadfence();  // the last block: all have counted
  control->blocks_done = 0;
  judge(*control, range, ranges.choices[block.range]);
}

__global__ void __launch_bounds__(kThreads)
    put_scores_kernel(RegTopKScore rule, SelectRanges ranges, RegTopKWork work, float* group) {
  const RangeBlock block = range_block(ranges.shares);
  const RegTopKControl& control = work.controls[block.range];
  if (!control.fell_back) return;
  const RegTopKLast last = work.last[block.range];
  float* const u = group + ranges.range[block.range].begin;
  const std::uint32_t count = control.last;
  const double weight = control.weight;
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    const float value = u[last.indices[i]];
    last.kept[i] = value;
    u[last.indices[i]] = score_of(rule, last, i, value, weight);
  }
}

__global__ void __launch_bounds__(kThreads)
    take_scores_back_kernel(SelectRanges ranges, RegTopKWork work, float* group) {
  const RangeBlock block = range_block(ranges.shares);
  const RegTopKControl& control = work.controls[block.range];
  if (!control.fell_back) return;
  const RegTopKLast last = work.last[block.range];
  float* const u = group + ranges.range[block.range].begin;
  const std::uint32_t count = control.last;
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads)
    u[last.indices[i]] = last.kept[i];
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(RegTopKScore rule, SelectRanges ranges, RegTopKWork work, const float* group) {
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const float* const u = group + range.begin;
  const Taken taken = range.taken;
  const std::uint32_t count = range.stats->count;
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads)
    taken.values[i] = u[taken.indices[i]];
  const Choice& choice = ranges.choices[block.range];
  RegTopKControl& control = work.controls[block.range];
  if (block.index != 0 || threadIdx.x != 0 || choice.skip || control.all) return;
  const float kth = magnitude_of(choice.kth);
  range.stats->threshold = static_cast<float>(rule.rest * static_cast<double>(kth));
  control.next_bound = control.bound.after(choice.kth, control.list);
}

__global__ void __launch_bounds__(kThreads)
    commit_kernel(SelectRanges ranges, const StepStatus* status, DeviceOutcome outcome, RegTopKWork work) {
  if (status->bad != 0) return;
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const RegTopKLast last = work.last[block.range];
  const float* const sent = outcome.sent + range.slot;
  const float* const average = outcome.average + range.begin;
  const std::uint32_t count = range.stats->count < last.capacity ? range.stats->count : last.capacity;
  const double weight = static_cast<double>(*outcome.weight) / outcome.ranks;
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    const std::uint32_t index = range.taken.indices[i];
    const double own = weight * static_cast<double>(sent[i]);
    last.indices[i] = index;
    last.own[i] = own;
    last.surplus[i] = static_cast<double>(average[index]) - own;
  }
  if (block.index != 0 || threadIdx.x != 0) return;
  RegTopKControl& control = work.controls[block.range];
  control.last = count;
  control.weight = weight;
  control.bound = control.next_bound;
}

}  // namespace

void regtopk_select(cudaStream_t stream, const RegTopKScore& rule, const SelectRanges& ranges,
                    const RegTopKWork& work, const Accumulate& accumulate, const StepParameters* parameters) {
  const std::uint32_t shares = ranges.shares.count;
  float* const u = accumulate.u;
  launch(plan_kernel, thread_per_range(ranges), kThreads, stream, rule, ranges, work, parameters);
  accumulate_and_list(stream, ranges, accumulate);
  launch(judge_kernel, shares, kThreads, stream, rule, ranges, work);
  launch(put_scores_kernel, shares, kThreads, stream, rule, ranges, work, u);
  take_largest(stream, ranges, u);
  launch(take_scores_back_kernel, shares, kThreads, stream, ranges, work, u);
  launch(finish_kernel, shares, kThreads, stream, rule, ranges, work, u);
}

void regtopk_commit(cudaStream_t stream, const SelectRanges& ranges, const RegTopKWork& work,
                    const StepStatus* status, const DeviceOutcome& outcome) {
  launch(commit_kernel, ranges.shares.count, kThreads, stream, ranges, status, outcome, work);
}

}  // namespace topknot::cuda
