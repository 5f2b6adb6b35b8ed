#pragma once
// Kernels that write a step's status, its outcome and its counters in GPU memory, where graphs find them.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "nn/core/bfloat16.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// The agreement of the ranks on whether a step is finite: what a rank, or a host for its ranks, tells the
// others with its groups: in the trailer of a compressed group's block (kTrailerBytes); if all groups are
// dense, by a NaN in the last one's sum, or, with hosts of several ranks, by a collective of its own.
struct RankStatus {
  std::int32_t bad_rank = -1;          // the first rank whose loss is not finite
  std::int32_t unused[3] = {0, 0, 0};  // a collective's block is a multiple of 16 bytes
};

// `loss`: one float, or null.
void write_rank_status(cudaStream_t stream, const float* loss, int rank, RankStatus* mine);
// *host = what `ranks` ranks of a host say together.
void join_rank_statuses(cudaStream_t stream, const RankStatus* first, int ranks, RankStatus* host);
// `first`: rank 0's or host 0's, each `stride` bytes after the one before. bad_rank is the first rank with a
// bad loss; without one the status stays as decoding has left it, but for a host's number, which becomes its
// first rank's. `alone`: there is one rank, whose step it was then.
void agree(cudaStream_t stream, const RankStatus* first, std::size_t stride, int statuses, int ranks_per_host,
           bool alone, StepStatus* status);
// *host = what `ranks` ranks of a host found in their parts.
void join_step_statuses(cudaStream_t stream, const StepStatus* first, int ranks, StepStatus* host);
// The first number of what is to be summed, one of the two and not both null, becomes a NaN if the loss is not finite.
void spoil_if_not_finite(cudaStream_t stream, const float* loss, float* sum, BFloat16* sum_bfloat16);

// The GPU's part of a step's report (StepReport), in page-locked host memory that kernels write to.
struct StepOutcome {
  double loss;
  StepStatus status;
  // GPU clock. The begin is that of the last step that started with no other step in flight.
  std::uint64_t begin_ns, end_ns;
};
// All but the begin, to slots[*count / per_slot % slots.size()]: in a graph, each replay finds its slot.
void write_outcome(cudaStream_t stream, const StepStatus* status, const float* loss,
                   const std::uint32_t* count, std::uint32_t per_slot, std::span<StepOutcome> slots);
// values[i] = first + i, for i < n
void count_up(cudaStream_t stream, std::uint32_t* values, std::uint32_t first, std::uint32_t n);

}  // namespace topknot::cuda
