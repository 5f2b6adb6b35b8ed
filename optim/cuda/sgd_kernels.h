#pragma once
// The kernels of SGD over a slice of the arena. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "nn/core/cuda/step_parameters.h"
#include "optim/sgd_rule.h"

namespace topknot::cuda {

// The elements [offset, offset + n) of the arena. `boundaries`: where decaying elements begin to follow others, or the
// other way round, ascending, in GPU memory; before the first one elements decay if `first_decays`.
struct SgdSlice {
  std::size_t offset, n;
  float* weights;         // of the slice
  const float* gradient;  // of the slice
  float* buffer;          // of the slice; null for the rules without momentum
  const std::uint64_t* boundaries;
  std::uint32_t boundary_count;
  bool first_decays;
};

// Nothing changes where the status is bad; `status` may be null.
void sgd_update(cudaStream_t stream, SgdRule rule, const SgdSlice& slice, float momentum, float decay,
                const StepParameters* parameters, const StepStatus* status);

}  // namespace topknot::cuda
