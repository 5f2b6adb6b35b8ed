#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/device.h"
#include "optim/rules.h"

namespace topknot::cuda {
namespace {

// A block's rates take two powers in double, which a short block would wait for longer than for its memory; so there
// are few blocks, a GPU's full, which go on in strides.
constexpr std::size_t kMostBlocks = 1024;

// kPacked: four elements per thread at a time; else one.
template <bool kPacked>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(ArenaSlice s, float* first, float* second, AdamwConstants constants,
                 const StepParameters* parameters, const StepStatus* status) {
  await_previous();
  constexpr std::size_t kSize = kPacked ? 4 : 1;
  __shared__ AdamwRates rates;
  if (status && status->bad) return;
  if (threadIdx.x == 0)
    rates = adamw_rates(constants, parameters->step, parameters->lr, parameters->gradient_scale);
  __syncthreads();
  std::size_t at = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * kSize;
  DecayRuns runs(s, s.offset + at);
  for (; at < s.n; at += std::size_t{gridDim.x} * kThreads * kSize) {
    if (kPacked && at + kSize <= s.n) {
      const float4 g = __ldcs(reinterpret_cast<const float4*>(s.gradient + at));
      float4 w = *reinterpret_cast<const float4*>(s.weights + at),
             m = *reinterpret_cast<const float4*>(first + at),
             v = *reinterpret_cast<const float4*>(second + at);
      adamw_step(w.x, g.x, m.x, v.x, rates, runs.decays(s.offset + at));
      adamw_step(w.y, g.y, m.y, v.y, rates, runs.decays(s.offset + at + 1));
      adamw_step(w.z, g.z, m.z, v.z, rates, runs.decays(s.offset + at + 2));
      adamw_step(w.w, g.w, m.w, v.w, rates, runs.decays(s.offset + at + 3));
      *reinterpret_cast<float4*>(s.weights + at) = w;
      *reinterpret_cast<float4*>(first + at) = m;
      *reinterpret_cast<float4*>(second + at) = v;
      continue;
    }
    for (std::size_t i = at; i < s.n && i < at + kSize; ++i)
      adamw_step(s.weights[i], s.gradient[i], first[i], second[i], rates, runs.decays(s.offset + i));
  }
}

void adamw_update(const ArenaSlice& slice, float* first, float* second, const AdamwConstants& constants,
                  const StepState& state) {
  if (slice.n == 0) return;
  const auto aligned = [](const float* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  const bool packed = aligned(slice.weights) && aligned(slice.gradient) && aligned(first) && aligned(second);
  launch(packed ? adamw_kernel<true> : adamw_kernel<false>,
         grid_for(slice.n, packed ? 4 * kThreads : kThreads, kMostBlocks), kThreads, compute_stream(), slice,
         first, second, constants, state.parameters, state.status);
}

const bool adamw_kernels = add_cuda_kernels<AdamwKernels>({adamw_update});

}  // namespace
}  // namespace topknot::cuda
