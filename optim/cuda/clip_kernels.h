#pragma once
// The kernels of clipping by norm. C++17.

#include <cuda_runtime_api.h>

#include <cstddef>

#include "nn/core/cuda/step_parameters.h"
#include "optim/clip_rule.h"

namespace topknot::cuda {

// sum = the sum of squares of n values, or, with `add`, the old sum and that. `blocks`: a double for each kClipBlock
// values begun.
void clip_sum_of_squares(cudaStream_t stream, const float* values, std::size_t n, double* blocks, double* sum,
                         bool add);
void clip_scale(cudaStream_t stream, float* values, std::size_t n, const double* sum, double max_norm);
void clip_set_gradient_scale(cudaStream_t stream, const double* sum, double max_norm,
                             StepParameters* parameters);

}  // namespace topknot::cuda
