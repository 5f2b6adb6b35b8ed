#pragma once
// The kernels of SGD over a slice of the arena. C++17.

#include <cuda_runtime_api.h>

#include "nn/core/cuda/step_parameters.h"
#include "optim/cuda/arena_slice.h"
#include "optim/sgd_rule.h"

namespace topknot::cuda {

// `buffer`: momenta of the slice; null for the rules without. Nothing changes where the status is bad; `status` may be null.
void sgd_update(cudaStream_t stream, SgdRule rule, const ArenaSlice& slice, float* buffer, float momentum,
                float decay, const StepParameters* parameters, const StepStatus* status);

}  // namespace topknot::cuda
