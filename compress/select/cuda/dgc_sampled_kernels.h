#pragma once
// DGC's sampled selection on a GPU (compress/select/dgc_sampled.cpp): all launches of a step's selection, in order.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/memory/accumulate.h"
#include "compress/select/cuda/gpu_select.h"
#include "compress/select/cuda/topk_kernels.h"
#include "compress/select/dgc_rule.h"
#include "nn/core/rng.h"
#include "nn/core/step.h"

namespace topknot::cuda {

struct DgcRule {
  double sample_ratio = 0.01;
  bool resample = true, lowest = true;
  PhiloxStream stream{};  // of the seed; step and rank follow from the step's parameters
};

// What a step finds out of a range, in GPU memory.
struct DgcControl {
  std::uint64_t stride = 1;
  std::uint32_t start = 0, samples = 0;  // what is sampled; none where t comes from the whole vector
  std::uint32_t k = 0;
  bool all = false;          // every entry is sent
  bool pending = false;      // the levels are to be counted
  float t = 0, first_t = 0;  // the threshold, and the one of the sample
  std::uint32_t count = 0;   // how many reach t
  int adaptations = 0;
  int levels = 0;  // thresholds to come, and how many reach them
  float level[dgc::kAdaptations] = {};
  std::uint32_t reach[dgc::kAdaptations] = {};
  std::uint32_t blocks_done = 0;
};

// By range, in GPU memory.
struct DgcWork {
  DgcControl* controls;
  const Source* samples;
  Choice *of_samples, *of_vector;  // where the threshold comes from: one of them is skipped, or both
};

// The samples' threshold; u and the list of what exceeds it; the changes of the threshold; what is taken.
void dgc_sampled_select(cudaStream_t stream, const DgcRule& rule, const SelectRanges& ranges,
                        const DgcWork& work, const Accumulate& accumulate, const StepParameters* parameters);
// Samples of a range of n elements, at most.
inline std::size_t dgc_most_samples(std::size_t n) {
  return n / 9 + 1;  // the least stride above 1 is 9
}

}  // namespace topknot::cuda
