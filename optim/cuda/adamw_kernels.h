#pragma once
// The kernel of AdamW over a slice of the arena. C++17.

#include <cuda_runtime_api.h>

#include "nn/core/cuda/step_parameters.h"
#include "optim/adamw_rule.h"
#include "optim/cuda/arena_slice.h"

namespace topknot::cuda {

// `first`, `second`: moments of the slice. Nothing changes where the status is bad; `status` may be null.
void adamw_update(cudaStream_t stream, const ArenaSlice& slice, float* first, float* second,
                  const AdamwConstants& constants, const StepParameters* parameters,
                  const StepStatus* status);

}  // namespace topknot::cuda
