#pragma once
// The trainer's own small kernels.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "nn/core/step.h"

namespace topknot::cuda {

// Loss and status of *result, in GPU memory.
void write_result(cudaStream_t stream, const StepStatus* status, const float* loss, StepReport* result);
// values[i] = first + i, for i < n
void count_up(cudaStream_t stream, std::uint32_t* values, std::uint32_t first, std::uint32_t n);

}  // namespace topknot::cuda
