#pragma once
// Top-k and a fixed threshold on a GPU: all launches of a step's selection, in order.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/select/cuda/gpu_select.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// Of a range, in GPU memory.
struct TopKState {
  CarriedBound carried;
  std::uint32_t k = 0;               // of this step
  std::uint32_t updates_bound = 0;   // 1: the step's k-th key becomes the bound
  ListState list = ListState::good;  // what this step's list was like
};

// States and counts: one per range.

// The k largest of u = accumulate(i), from the list of what exceeds the last bound where it holds them.
void topk_select(cudaStream_t stream, const SelectRanges& ranges, TopKState* states,
                 const Accumulate& accumulate, const StepParameters* parameters);
void topk_commit(cudaStream_t stream, const SelectRanges& ranges, TopKState* states,
                 const StepStatus* status);

// What exceeds the threshold, under compress.capacity (`multiple`; 0: none).
void threshold_select(cudaStream_t stream, const SelectRanges& ranges, std::uint32_t* counts,
                      double threshold, double multiple, const Accumulate& accumulate,
                      const StepParameters* parameters);

}  // namespace topknot::cuda
