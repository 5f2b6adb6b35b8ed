#pragma once
// The average of sparse contributions on a GPU: compress/average.h once more, bit for bit. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>

#include "compress/codec/cuda/device_block.h"
#include "nn/core/cuda/step_parameters.h"

namespace topknot::cuda {

// Overwrites `average`, n floats, where the status is good; else leaves it. `lists`: of `ranks` ranks, room
// for `capacity` entries each. `weights`: one a rank, in GPU memory.
void average_entries(cudaStream_t stream, const StepStatus* status, const DecodedEntries& lists,
                     std::size_t capacity, int ranks, const float* weights, float* average, std::size_t n);

}  // namespace topknot::cuda
