#pragma once
// A stream of gradients to time the selections with.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace topknot::gpu_timings {

// Nearly normal numbers, others in each step; 20 layers whose scales span two decades, as gradients have.
void fill_gradient(cudaStream_t stream, float* gradient, std::size_t n, std::uint32_t step);

}  // namespace topknot::gpu_timings
