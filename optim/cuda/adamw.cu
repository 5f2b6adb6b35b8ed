#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "optim/cuda/adamw_kernels.h"

namespace topknot::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(ArenaSlice s, float* first, float* second, AdamwConstants constants,
                 const StepParameters* parameters, const StepStatus* status) {
  __shared__ AdamwRates rates;  // in double, so one thread computes them
  if (status && status->bad) return;
  if (threadIdx.x == 0)
    rates = adamw_rates(constants, parameters->step, parameters->lr, parameters->gradient_scale);
  __syncthreads();
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= s.n) return;
  adamw_step(s.weights[i], s.gradient[i], first[i], second[i], rates,
             DecayRuns(s, s.offset + i).decays(s.offset + i));
}

}  // namespace

void adamw_update(cudaStream_t stream, const ArenaSlice& slice, float* first, float* second,
                  const AdamwConstants& constants, const StepParameters* parameters,
                  const StepStatus* status) {
  if (slice.n == 0) return;
  launch(adamw_kernel, grid_for(slice.n, kThreads), kThreads, stream, slice, first, second, constants,
         parameters, status);
}

}  // namespace topknot::cuda
