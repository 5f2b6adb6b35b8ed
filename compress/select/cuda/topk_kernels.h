#pragma once
// The kernels between the passes of topk on a GPU. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/select/cuda/gpu_select.h"
#include "nn/core/cuda/step_parameters.h"

namespace topknot::cuda {

// In GPU memory.
struct TopKState {
  CarriedBound<float> carried;
  GpuKey above;                 // of this step's list
  std::uint32_t k;              // of this step
  std::uint32_t updates_bound;  // 1: the step's k-th key becomes the bound
  ListState list;               // what this step's list was like
  Choice choice;
};

void topk_reset(cudaStream_t stream, TopKState* state);
// k and the list's bound.
void topk_begin(cudaStream_t stream, TopKState* state, const StepParameters* parameters, std::size_t n);
// Whether the list holds the k largest: else they are taken from the whole vector.
void topk_decide(cudaStream_t stream, TopKState* state, const EntryList& list, std::size_t n,
                 std::uint32_t capacity, const StatsOut& stats);
void topk_commit(cudaStream_t stream, TopKState* state, const StepStatus* status);

// Selection `threshold`: the state's `above` and the choice, under compress.capacity (0: none).
void threshold_begin(cudaStream_t stream, TopKState* state, const StepParameters* parameters,
                     double threshold, std::size_t n);
void threshold_decide(cudaStream_t stream, TopKState* state, const EntryList& list, double threshold,
                      double multiple, std::uint32_t capacity, const StatsOut& stats);

}  // namespace topknot::cuda
