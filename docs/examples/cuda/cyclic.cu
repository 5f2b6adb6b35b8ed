#include "compress/select/cuda/gpu_select.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/cuda/step_parameters.h"

namespace topknot::cuda {
namespace {

__global__ void reset_kernel(GpuKey* above) {
  *above = kLargestFinite;
}

// A thread for each entry.
__global__ void take_kernel(const StepParameters* step, std::size_t n, std::size_t phase, const float* u,
                            const ListStats* found, Taken taken, StatsOut stats) {
  const std::size_t k = density_count(step->density, n), stride = (n + k - 1) / k;
  const std::size_t first = (static_cast<std::size_t>(step->step) + phase) % stride;
  const std::size_t count = found->finite ? (n - first + stride - 1) / stride : 0;
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i == 0) {
    *stats.count = static_cast<std::uint32_t>(count);
    *stats.finite = found->finite;
    *stats.over = 0;
    *stats.threshold = 0;
  }
  if (i >= count) return;
  taken.indices[i] = static_cast<std::uint32_t>(first + i * stride);
  taken.values[i] = u[first + i * stride];
}

}  // namespace

void cyclic_reset(cudaStream_t stream, GpuKey* above) {
  launch(reset_kernel, 1, 1, stream, above);
}
void cyclic_take(cudaStream_t stream, const StepParameters* step, std::size_t n, std::size_t phase,
                 const float* u, const ListStats* found, const Taken& taken, const StatsOut& stats) {
  launch(take_kernel, grid_for(taken.capacity, kThreads), kThreads, stream, step, n, phase, u, found, taken,
         stats);
}

}  // namespace topknot::cuda
