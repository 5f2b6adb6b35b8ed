#include "compress/select/cuda/topk_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// All of one thread.

__global__ void reset_kernel(TopKState* state) {
  *state = TopKState{};
}

__global__ void topk_begin_kernel(TopKState* state, const StepParameters* parameters, std::size_t n) {
  state->k = static_cast<std::uint32_t>(density_count(parameters->density, n));
  state->above = state->carried.above(state->k == n);
}

__global__ void topk_decide_kernel(TopKState* state, EntryList list, std::size_t n, std::uint32_t capacity,
                                   StatsOut stats) {
  const ListStats found = *list.stats;
  const std::uint32_t k = state->k < capacity ? state->k : capacity;
  state->list = list_state(found.count <= list_limit(k) && found.count <= list.limit, found.count, k);
  state->updates_bound = found.finite && k < n;
  Choice choice;
  choice.skip = !found.finite;
  choice.whole = state->list != ListState::good;
  choice.k = k;
  state->choice = choice;
  *stats.count = found.finite ? k : 0;
  *stats.finite = found.finite;
  *stats.over = 0;
  *stats.threshold = 0;  // until the k-th magnitude is known
}

__global__ void topk_commit_kernel(TopKState* state, const StepStatus* status) {
  if (status->bad || !state->updates_bound) return;
  state->carried = state->carried.after(state->choice.kth, state->list);
}

__global__ void threshold_begin_kernel(TopKState* state, const StepParameters* parameters, double threshold,
                                       std::size_t n) {
  state->k = static_cast<std::uint32_t>(density_count(parameters->density, n));
  state->above = parameters->density >= 1 ? -1 : key_below<float>(threshold);
}

__global__ void threshold_decide_kernel(TopKState* state, EntryList list, double threshold, double multiple,
                                        std::uint32_t capacity, StatsOut stats) {
  const ListStats found = *list.stats;
  Choice choice;
  std::uint32_t kept = 0, over = 0;
  choose_within(multiple, state->k, found.finite ? found.count : 0, state->above, choice, kept, over);
  choice.whole = found.count > list.limit;
  state->choice = choice;
  *stats.count = kept < capacity ? kept : capacity;
  *stats.finite = found.finite;
  *stats.over = over;
  *stats.threshold = found.finite && state->above >= 0 ? static_cast<float>(threshold) : 0.0f;
}

}  // namespace

void topk_reset(cudaStream_t stream, TopKState* state) {
  launch(reset_kernel, 1, 1, stream, state);
}
void topk_begin(cudaStream_t stream, TopKState* state, const StepParameters* parameters, std::size_t n) {
  launch(topk_begin_kernel, 1, 1, stream, state, parameters, n);
}
void topk_decide(cudaStream_t stream, TopKState* state, const EntryList& list, std::size_t n,
                 std::uint32_t capacity, const StatsOut& stats) {
  launch(topk_decide_kernel, 1, 1, stream, state, list, n, capacity, stats);
}
void topk_commit(cudaStream_t stream, TopKState* state, const StepStatus* status) {
  launch(topk_commit_kernel, 1, 1, stream, state, status);
}
void threshold_begin(cudaStream_t stream, TopKState* state, const StepParameters* parameters,
                     double threshold, std::size_t n) {
  launch(threshold_begin_kernel, 1, 1, stream, state, parameters, threshold, n);
}
void threshold_decide(cudaStream_t stream, TopKState* state, const EntryList& list, double threshold,
                      double multiple, std::uint32_t capacity, const StatsOut& stats) {
  launch(threshold_decide_kernel, 1, 1, stream, state, list, threshold, multiple, capacity, stats);
}

}  // namespace topknot::cuda
