#include "compress/memory/cuda/device_memory_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) commit_kernel(MemoryCommit step) {
  const std::size_t first = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::size_t stride = std::size_t{gridDim.x} * kThreads;
  if (first == 0 && step.current) *step.current = step.written;
  if (step.status->bad != 0) {
    for (std::size_t i = first; i < step.n; i += stride) {
      __stcs(step.u + i, __ldcs(step.residual + i));
      if (step.velocity) __stcs(step.velocity + i, __ldcs(step.old_velocity + i));
    }
    return;
  }
  const std::size_t count = *step.count;
  for (std::size_t i = first; i < count; i += stride) {
    const std::uint32_t at = step.positions[i];
    step.u[at] -= step.values[i];  // +0 where values are sent exactly, else the coding error
    if (step.velocity && step.masking) step.velocity[at] = 0;
  }
}

}  // namespace

void commit_memory(cudaStream_t stream, const MemoryCommit& step) {
  // Enough to copy at the memory's speed, in the step that is refused.
  const std::size_t entries = step.capacity > step.n / 16 ? step.capacity : step.n / 16;
  launch(commit_kernel, grid_for(entries, kThreads, 1024), kThreads, stream, step);
}

}  // namespace topknot::cuda
