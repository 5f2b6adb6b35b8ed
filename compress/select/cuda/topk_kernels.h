#pragma once
// The kernels between the passes of topk on a GPU. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/select/cuda/gpu_select.h"
#include "nn/core/cuda/step_parameters.h"

namespace topknot::cuda {

// Of a range, in GPU memory.
struct TopKState {
  CarriedBound<float> carried;
  std::uint32_t k = 0;               // of this step
  std::uint32_t updates_bound = 0;   // 1: the step's k-th key becomes the bound
  ListState list = ListState::good;  // what this step's list was like
};

// States and counts: one per range.

// k and the lists' bounds.
void topk_begin(cudaStream_t stream, const SelectRanges& ranges, TopKState* states,
                const StepParameters* parameters);
// Whether a list holds the k largest: else they are taken from the whole vector.
void topk_decide(cudaStream_t stream, const SelectRanges& ranges, TopKState* states);
void topk_commit(cudaStream_t stream, const SelectRanges& ranges, TopKState* states,
                 const StepStatus* status);

// Selection `threshold`: k and the lists' bounds, and the choices, under compress.capacity (0: none).
void threshold_begin(cudaStream_t stream, const SelectRanges& ranges, std::uint32_t* counts,
                     const StepParameters* parameters, double threshold);
void threshold_decide(cudaStream_t stream, const SelectRanges& ranges, const std::uint32_t* counts,
                      double threshold, double multiple);

}  // namespace topknot::cuda
