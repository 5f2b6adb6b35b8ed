#include "compress/select/cuda/topk_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// All of one thread.

__global__ void reset_kernel(TopKState* state) {
  *state = TopKState{};
}

__global__ void topk_begin_kernel(TopKState* state, const StepWords* words, std::size_t n) {
  state->k = gpu_target_count(words->density, n);
  state->above = state->k == n ? kLargestFinite : state->carried.above();
}

__global__ void topk_decide_kernel(TopKState* state, EntryList list, std::size_t n, std::uint32_t capacity,
                                   FactsOut facts) {
  using List = GpuBound::List;
  const ListFacts found = *list.facts;
  const std::uint32_t k = state->k < capacity ? state->k : capacity;
  const std::uint64_t most = 8 * std::uint64_t{k} + 4096;
  state->list = found.count > most || found.count > list.limit ? List::too_many
                : found.count < k                              ? List::too_few
                                                               : List::good;
  state->learns = found.finite && k < n;
  Choice choice;
  choice.skip = !found.finite;
  choice.whole = state->list != List::good;
  choice.k = k;
  state->choice = choice;
  *facts.count = found.finite ? k : 0;
  *facts.finite = found.finite;
  *facts.over = 0;
  *facts.threshold = 0;  // until the k-th magnitude is known
}

__global__ void topk_commit_kernel(TopKState* state, const Verdict* verdict) {
  if (verdict->bad || !state->learns) return;
  state->carried = state->carried.after(state->choice.kth, state->list);
}

__global__ void threshold_begin_kernel(TopKState* state, const StepWords* words, double threshold,
                                       std::size_t n) {
  state->k = gpu_target_count(words->density, n);
  state->above = words->density >= 1 ? -1 : gpu_key_below(threshold);
}

__global__ void threshold_decide_kernel(TopKState* state, EntryList list, double threshold, double multiple,
                                        std::uint32_t capacity, FactsOut facts) {
  const ListFacts found = *list.facts;
  Choice choice;
  std::uint32_t kept = 0, over = 0;
  choose_within(multiple, state->k, found.finite ? found.count : 0, state->above, choice, kept, over);
  choice.whole = found.count > list.limit;
  state->choice = choice;
  *facts.count = kept < capacity ? kept : capacity;
  *facts.finite = found.finite;
  *facts.over = over;
  *facts.threshold = found.finite && state->above >= 0 ? static_cast<float>(threshold) : 0.0f;
}

}  // namespace

void topk_reset(cudaStream_t stream, TopKState* state) {
  launch(reset_kernel, 1, 1, stream, state);
}
void topk_begin(cudaStream_t stream, TopKState* state, const StepWords* words, std::size_t n) {
  launch(topk_begin_kernel, 1, 1, stream, state, words, n);
}
void topk_decide(cudaStream_t stream, TopKState* state, const EntryList& list, std::size_t n,
                 std::uint32_t capacity, const FactsOut& facts) {
  launch(topk_decide_kernel, 1, 1, stream, state, list, n, capacity, facts);
}
void topk_commit(cudaStream_t stream, TopKState* state, const Verdict* verdict) {
  launch(topk_commit_kernel, 1, 1, stream, state, verdict);
}
void threshold_begin(cudaStream_t stream, TopKState* state, const StepWords* words, double threshold,
                     std::size_t n) {
  launch(threshold_begin_kernel, 1, 1, stream, state, words, threshold, n);
}
void threshold_decide(cudaStream_t stream, TopKState* state, const EntryList& list, double threshold,
                      double multiple, std::uint32_t capacity, const FactsOut& facts) {
  launch(threshold_decide_kernel, 1, 1, stream, state, list, threshold, multiple, capacity, facts);
}

}  // namespace topknot::cuda
