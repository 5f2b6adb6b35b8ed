#pragma once
// Elementwise kernels of the CUDA device backend. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>

namespace topknot::cuda {

void fill_floats(cudaStream_t stream, float* data, std::size_t n, float value);
// out = a + b, elementwise; out may be a or b.
void add_floats(cudaStream_t stream, const float* a, const float* b, float* out, std::size_t n);
// As add_floats, of bfloat16 numbers: added as floats and rounded once.
void add_bfloat16(cudaStream_t stream, const void* a, const void* b, void* out, std::size_t n);

}  // namespace topknot::cuda
