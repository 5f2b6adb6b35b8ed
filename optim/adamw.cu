#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/device.h"
#include "optim/rules.h"

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

void adamw_update(const ArenaSlice& slice, float* first, float* second, const AdamwConstants& constants,
                  const StepState& state) {
  if (slice.n == 0) return;
  launch(adamw_kernel, grid_for(slice.n, kThreads), kThreads, compute_stream(), slice, first, second,
         constants, state.parameters, state.status);
}

const RegisterKernels<AdamwKernels> adamw_kernels(DeviceKind::cuda, {adamw_update});

}  // namespace
}  // namespace topknot::cuda
