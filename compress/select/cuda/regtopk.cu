#include "compress/select/cuda/regtopk_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

__device__ float score_of(const RegTopKScore& rule, const RegTopKLast& last, std::uint32_t i, float u,
                          double weight) {
  return rule(u, weight, last.own[i], last.surplus[i], magnitude_of<float>(kLargestFinite));
}

__global__ void clear_kernel(RegTopKControl* control) {
  *control = RegTopKControl();
}

__global__ void plan_kernel(RegTopKScore rule, std::size_t n, std::uint32_t capacity,
                            const StepParameters* parameters, RegTopKControl* control) {
  RegTopKControl& c = *control;
  const std::uint32_t k = static_cast<std::uint32_t>(density_count(parameters->density, n));
  c.k = k < capacity ? k : capacity;
  c.all = c.k == n;
  c.fell_back = false;
  c.next_bound = c.bound;
  c.enough = c.blocks_done = 0;
  c.above = c.bound.above(c.all);
  c.listed_above = rule.listed_above(c.bound, c.all);
}

__device__ void judge(RegTopKControl& c, std::size_t count, std::size_t limit, bool finite,
                      const StatsOut& stats) {
  *stats.finite = finite;
  *stats.over = 0;
  *stats.threshold = 0;
  *stats.count = finite ? c.k : 0;
  c.choice.skip = !finite;
  c.choice.known = 0;
  c.choice.k = c.k;
  // Where all travel the bound stays as it is.
  c.list = c.all ? ListState::good : list_state(count <= limit, c.enough, c.k);
  c.fell_back = c.list != ListState::good;
  c.choice.whole = c.all || c.fell_back;
}

__global__ void __launch_bounds__(kThreads) judge_kernel(RegTopKScore rule, RegTopKLast last, EntryList list,
                                                         RegTopKControl* control, StatsOut stats) {
  const std::uint32_t count = list.stats->count, known = control->last;
  const double weight = control->weight;
  const GpuKey above = control->above;
  std::uint32_t enough = 0;
  if (!control->all && count <= list.limit)
    for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
         i += std::size_t{gridDim.x} * kThreads) {
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
  if (atomicAdd(&control->blocks_done, 1u) != gridDim.x - 1) return;
  __threadfence();  // the last block: all have counted
  control->blocks_done = 0;
  judge(*control, count, list.limit, list.stats->finite != 0, stats);
}

__global__ void __launch_bounds__(kThreads)
    put_scores_kernel(RegTopKScore rule, RegTopKLast last, float* u, const RegTopKControl* control) {
  if (!control->fell_back) return;
  const std::uint32_t count = control->last;
  const double weight = control->weight;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const float value = u[last.indices[i]];
    last.kept[i] = value;
    u[last.indices[i]] = score_of(rule, last, i, value, weight);
  }
}

__global__ void __launch_bounds__(kThreads)
    take_scores_back_kernel(RegTopKLast last, float* u, const RegTopKControl* control) {
  if (!control->fell_back) return;
  const std::uint32_t count = control->last;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads)
    u[last.indices[i]] = last.kept[i];
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(RegTopKScore rule, const float* u, RegTopKControl* control, Taken taken, StatsOut stats) {
  const std::uint32_t count = *stats.count;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads)
    taken.values[i] = u[taken.indices[i]];
  if (blockIdx.x != 0 || threadIdx.x != 0 || control->choice.skip) return;
  if (control->all) return;
  const float kth = magnitude_of<float>(control->choice.kth);
  *stats.threshold = static_cast<float>(rule.rest * static_cast<double>(kth));
  control->next_bound = control->bound.after(control->choice.kth, control->list);
}

__global__ void __launch_bounds__(kThreads)
    commit_kernel(const StepStatus* status, const std::uint32_t* indices, const std::uint32_t* count_at,
                  const float* sent, const float* average, const float* weight_at, int ranks,
                  RegTopKLast last, RegTopKControl* control) {
  if (status->bad != 0) return;
  const std::uint32_t count = *count_at < last.capacity ? *count_at : last.capacity;
  const double weight = static_cast<double>(*weight_at) / ranks;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) {
    const std::uint32_t index = indices[i];
    const double own = weight * static_cast<double>(sent[i]);
    last.indices[i] = index;
    last.own[i] = own;
    last.surplus[i] = static_cast<double>(average[index]) - own;
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  control->last = count;
  control->weight = weight;
  control->bound = control->next_bound;
}

dim3 entry_grid(std::size_t entries) {
  return grid_for(entries, kThreads, 1024);
}

}  // namespace

void regtopk_clear(cudaStream_t stream, RegTopKControl* control) {
  launch(clear_kernel, 1, 1, stream, control);
}

void regtopk_plan(cudaStream_t stream, const RegTopKScore& rule, std::size_t n, std::uint32_t capacity,
                  const StepParameters* parameters, RegTopKControl* control) {
  launch(plan_kernel, 1, 1, stream, rule, n, capacity, parameters, control);
}

void regtopk_judge(cudaStream_t stream, const RegTopKScore& rule, const RegTopKLast& last,
                   const EntryList& list, RegTopKControl* control, const StatsOut& stats) {
  launch(judge_kernel, entry_grid(list.limit), kThreads, stream, rule, last, list, control, stats);
}

void regtopk_put_scores(cudaStream_t stream, const RegTopKScore& rule, const RegTopKLast& last, float* u,
                        const RegTopKControl* control) {
  launch(put_scores_kernel, entry_grid(last.capacity), kThreads, stream, rule, last, u, control);
}

void regtopk_take_scores_back(cudaStream_t stream, const RegTopKLast& last, float* u,
                              const RegTopKControl* control) {
  launch(take_scores_back_kernel, entry_grid(last.capacity), kThreads, stream, last, u, control);
}

void regtopk_finish(cudaStream_t stream, const RegTopKScore& rule, const float* u, RegTopKControl* control,
                    const Taken& taken, const StatsOut& stats) {
  launch(finish_kernel, entry_grid(taken.capacity), kThreads, stream, rule, u, control, taken, stats);
}

void regtopk_commit(cudaStream_t stream, const StepStatus* status, const std::uint32_t* indices,
                    const std::uint32_t* count, const float* sent, const float* average, const float* weight,
                    int ranks, const RegTopKLast& last, RegTopKControl* control) {
  launch(commit_kernel, entry_grid(last.capacity), kThreads, stream, status, indices, count, sent, average,
         weight, ranks, last, control);
}

}  // namespace topknot::cuda
