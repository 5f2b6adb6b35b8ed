#pragma once
// GaussianK on a GPU: all launches of a step's selection, in order.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/select/cuda/gpu_select.h"
#include "compress/select/gaussiank_rule.h"
#include "nn/core/step.h"

namespace topknot::cuda {

inline constexpr std::size_t kMomentsChunk = 16384;  // kChunk of compress/parallel.h: sums are made by chunk
using gaussiank::kLevels;

// Sums of a chunk of x - shift and of its square.
struct ChunkMoments {
  double sum, squares;
};

// Of a range, in GPU memory.
struct GaussianKState {
  std::int32_t carried;  // the level at which the last committed step ended
  // Of this step:
  std::int32_t next;
  std::uint32_t k;
  double shift;
  std::uint32_t broken;   // 1: a NaN or Inf somewhere
  std::uint32_t nonzero;  // 1: not all is zero
  gaussiank::Way way;
  gaussiank::Thresholds threshold;
  MagnitudeKey above[kLevels];
  std::uint32_t counts[kLevels];
};

// z: minus the normal quantile of density / 2. For other densities the kernel computes its own, in which the last
// bits may differ from the CPU's.
struct DensityQuantile {
  double density, z;
};

// In GPU memory.
struct GaussianKWork {
  GaussianKState* states;            // by range
  const DensityQuantile* quantiles;  // by range
  RangeBlocks blocks;                // a block a chunk; ranges' chunks one after the other
  ChunkMoments* chunks;              // by block
};

// u = accumulate(i), and its moments by chunk, in double, over 16 lanes, as accumulate_with_moments() of
// compress/select/passes/passes.h (12 bytes per element); the thresholds; what reaches each (4 bytes per element); the
// rule's evaluations, and the choices, under compress.capacity (`multiple`; 0: none).
void gaussiank_select(cudaStream_t stream, const SelectRanges& ranges, const GaussianKWork& work,
                      double multiple, const Accumulate& accumulate, const StepParameters* parameters);
void gaussiank_commit(cudaStream_t stream, const SelectRanges& ranges, GaussianKState* states,
                      const StepStatus* status);

}  // namespace topknot::cuda
