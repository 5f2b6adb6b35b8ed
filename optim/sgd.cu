#include <topknot_kernel.h>

#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/device.h"
#include "optim/rules.h"

namespace topknot::cuda {
namespace {

// kPacked: four elements per thread; else one.
template <SgdRule rule, bool kPacked>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(ArenaSlice s, float* buffer, SgdOptions options, const StepParameters* parameters,
               const StepStatus* status) {
  await_previous();
  constexpr int kSize = kPacked ? 4 : 1;
  if (status && status->bad) return;
  const std::size_t first = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * kSize;
  if (first >= s.n) return;
  SgdRates rates{static_cast<float>(parameters->lr), options.momentum, 0,
                 static_cast<float>(parameters->gradient_scale)};
  DecayRuns runs(s, s.offset + first);
  const auto step = [&](float& weight, float gradient, float& b, int j) {
    rates.decay = runs.decays(s.offset + first + j) ? options.decay : 0.0f;
    sgd_step<rule>(weight, gradient, b, rates);
  };
  float unused = 0;
  if (kPacked && first + kSize <= s.n) {
    const float4 g = __ldcs(reinterpret_cast<const float4*>(s.gradient + first));
    float4 w = *reinterpret_cast<const float4*>(s.weights + first), b{};
    if (kHasMomentum<rule>) b = *reinterpret_cast<const float4*>(buffer + first);
    step(w.x, g.x, b.x, 0);
    step(w.y, g.y, b.y, 1);
    step(w.z, g.z, b.z, 2);
    step(w.w, g.w, b.w, 3);
    *reinterpret_cast<float4*>(s.weights + first) = w;
    if (kHasMomentum<rule>) *reinterpret_cast<float4*>(buffer + first) = b;
    return;
  }
  for (int j = 0; j < kSize; ++j)
    if (first + j < s.n)
      step(s.weights[first + j], s.gradient[first + j], kHasMomentum<rule> ? buffer[first + j] : unused, j);
}

template <SgdRule rule>
void update_by(const ArenaSlice& s, float* buffer, SgdOptions options, const StepState& state) {
  const auto aligned = [](const float* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  if (aligned(s.weights) && aligned(s.gradient) && aligned(buffer))
    launch(sgd_kernel<rule, true>, grid_for(s.n, kThreads * 4), kThreads, compute_stream(), s, buffer,
           options, state.parameters, state.status);
  else
    launch(sgd_kernel<rule, false>, grid_for(s.n, kThreads), kThreads, compute_stream(), s, buffer, options,
           state.parameters, state.status);
}

void sgd_update(SgdRule rule, const ArenaSlice& slice, float* buffer, SgdOptions options,
                const StepState& state) {
  if (slice.n == 0) return;
  // In the order of SgdRule.
  constexpr decltype(&update_by<SgdRule::plain>) by_rule[] = {
      update_by<SgdRule::plain>,          update_by<SgdRule::momentum>,       update_by<SgdRule::nesterov>,
      update_by<SgdRule::decay_momentum>, update_by<SgdRule::decay_nesterov>, update_by<SgdRule::lr_applied>};
  by_rule[static_cast<std::size_t>(rule)](slice, buffer, options, state);
}

const bool sgd_kernels = add_cuda_kernels<SgdKernels>({sgd_update});

}  // namespace
}  // namespace topknot::cuda
