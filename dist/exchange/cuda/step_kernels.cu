#include "dist/exchange/cuda/step_kernels.h"

#include "dist/sparse/hierarchical.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

__device__ bool not_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}

__global__ void rank_status_kernel(const float* loss, int rank, RankStatus* mine) {
  await_previous();
  *mine = RankStatus{loss && not_finite(*loss) ? rank : -1, {0, 0, 0}};
}

// The first of the ranks that the statuses name, or -1: ranks ascend from status to status.
__device__ int first_bad(const std::byte* first, std::size_t stride, int statuses) {
  for (int i = 0; i < statuses; ++i) {
    const int rank =
        reinterpret_cast<const RankStatus*>(first + static_cast<std::size_t>(i) * stride)->bad_rank;
    if (rank >= 0) return rank;
  }
  return -1;
}

__global__ void join_statuses_kernel(const std::byte* first, int ranks, RankStatus* host) {
  await_previous();
  *host = RankStatus{first_bad(first, sizeof(RankStatus), ranks), {0, 0, 0}};
}

__global__ void join_steps_kernel(const StepStatus* first, int ranks, StepStatus* host) {
  await_previous();
  StepStatus joined;
  for (int rank = 0; rank < ranks; ++rank) join_status(joined, first[rank]);
  *host = joined;
}

__global__ void spoil_kernel(const float* loss, float* sum, __nv_bfloat16* sum_bfloat16) {
  await_previous();
  if (!not_finite(*loss)) return;
  const float nan = __uint_as_float(0x7fc00000u);
  if (sum)
    *sum = nan;
  else
    *sum_bfloat16 = __float2bfloat16_rn(nan);
}

__global__ void agree_kernel(const std::byte* first, std::size_t stride, int statuses, int ranks_per_host,
                             bool alone, StepStatus* status) {
  await_previous();
  const int bad_loss = first_bad(first, stride, statuses);
  if (bad_loss >= 0) {
    status->bad = 1;
    status->bad_rank = bad_loss;
  } else if (status->bad_rank > 0) {
    status->bad_rank *= ranks_per_host;
  } else if (status->bad && alone) {
    status->bad_rank = 0;
  }
}

__global__ void outcome_kernel(const StepStatus* status, const float* loss, const std::uint32_t* count,
                               std::uint32_t per_slot, StepOutcome* slots, std::uint32_t n) {
  await_previous();
  StepOutcome& outcome = slots[*count / per_slot % n];
  outcome.status = *status;
  outcome.loss = *loss;
  outcome.end_ns = global_nanoseconds();
}

__global__ void count_up_kernel(std::uint32_t* values, std::uint32_t first, std::uint32_t n) {
  await_previous();
  for (std::uint32_t i = threadIdx.x; i < n; i += blockDim.x) values[i] = first + i;
}

}  // namespace

void write_rank_status(cudaStream_t stream, const float* loss, int rank, RankStatus* mine) {
  launch(rank_status_kernel, 1, 1, stream, loss, rank, mine);
}

void join_rank_statuses(cudaStream_t stream, const RankStatus* first, int ranks, RankStatus* host) {
  launch(join_statuses_kernel, 1, 1, stream, reinterpret_cast<const std::byte*>(first), ranks, host);
}

void agree(cudaStream_t stream, const RankStatus* first, std::size_t stride, int statuses, int ranks_per_host,
           bool alone, StepStatus* status) {
  launch(agree_kernel, 1, 1, stream, reinterpret_cast<const std::byte*>(first), stride, statuses,
         ranks_per_host, alone, status);
}

void join_step_statuses(cudaStream_t stream, const StepStatus* first, int ranks, StepStatus* host) {
  launch(join_steps_kernel, 1, 1, stream, first, ranks, host);
}

void spoil_if_not_finite(cudaStream_t stream, const float* loss, float* sum, BFloat16* sum_bfloat16) {
  launch(spoil_kernel, 1, 1, stream, loss, sum, reinterpret_cast<__nv_bfloat16*>(sum_bfloat16));
}

void write_outcome(cudaStream_t stream, const StepStatus* status, const float* loss,
                   const std::uint32_t* count, std::uint32_t per_slot, std::span<StepOutcome> slots) {
  launch(outcome_kernel, 1, 1, stream, status, loss, count, per_slot, slots.data(),
         static_cast<std::uint32_t>(slots.size()));
}

void count_up(cudaStream_t stream, std::uint32_t* values, std::uint32_t first, std::uint32_t n) {
  launch(count_up_kernel, 1, 32, stream, values, first, n);
}

}  // namespace topknot::cuda
