#pragma once
// Elementwise kernels, checksums and the clock of the CUDA device backend.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "nn/core/step.h"

namespace topknot::cuda {

void fill_floats(cudaStream_t stream, float* data, std::size_t n, float value);
// out = a + b, elementwise; out may be a or b.
void add_floats(cudaStream_t stream, const float* a, const float* b, float* out, std::size_t n);
// As add_floats, of bfloat16 numbers: added as floats and rounded once.
void add_bfloat16(cudaStream_t stream, const void* a, const void* b, void* out, std::size_t n);
// sum += factor * values, elementwise
void add_scaled_floats(cudaStream_t stream, float* sum, const float* values, std::size_t n, float factor);
// *sum += factor * *value
void add_to_sum(cudaStream_t stream, double* sum, const float* value, double factor);
// to = from if the step is bad.
void restore_if_bad(cudaStream_t stream, const StepStatus* status, const float* from, float* to,
                    std::size_t n);
// *at = the GPU's clock in nanoseconds, when the stream comes here. All streams of a GPU have one clock; it advances in steps of
// up to about a microsecond.
void write_time(cudaStream_t stream, std::uint64_t* at);
// *sum += the checksum (nn/base/checksum.h) of the elements.
void add_checksum(cudaStream_t stream, const float* data, std::size_t n, std::uint64_t* sum);

}  // namespace topknot::cuda
