#pragma once
// What losses share on a GPU.

#include <cuda_runtime_api.h>

#include <cstddef>

namespace topknot::cuda {

// *out = the sum of n values / by, as a float; in double, in a fixed order.
void mean_of(cudaStream_t stream, const double* values, std::size_t n, double by, float* out);

}  // namespace topknot::cuda
