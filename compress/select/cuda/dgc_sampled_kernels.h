#pragma once
// The decisions of DGC's sampled selection on a GPU (compress/select/dgc_sampled.h). C++17.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/memory/accumulate.h"
#include "compress/select/cuda/gpu_select.h"
#include "compress/select/cuda/topk_kernels.h"
#include "compress/select/dgc_rule.h"
#include "nn/core/cuda/step_parameters.h"
#include "nn/core/rng.h"

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
  bool all = false;          // every entry travels
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

void dgc_plan(cudaStream_t stream, const DgcRule& rule, const SelectRanges& ranges, const DgcWork& work,
              const StepParameters* parameters);
// Draws the samples. Of a range of n elements there are dgc_most_samples(n) at most.
void dgc_sample(cudaStream_t stream, const SelectRanges& ranges, const DgcWork& work,
                const Accumulate& accumulate);
inline std::size_t dgc_most_samples(std::size_t n) {
  return n / 9 + 1;  // the least stride above 1 is 9
}
// The bounds of the pass that lists, from the samples' thresholds.
void dgc_bound(cudaStream_t stream, const SelectRanges& ranges, const DgcWork& work);
// After that pass, and where the sample was the whole vector, its k-th magnitude.
void dgc_judge(cudaStream_t stream, const DgcRule& rule, const SelectRanges& ranges, const DgcWork& work);
// Counts what reaches the levels, and decides. Enough are 1 with resampling, else kAdaptations.
void dgc_adapt(cudaStream_t stream, const DgcRule& rule, const SelectRanges& ranges, const DgcWork& work,
               const float* u);

}  // namespace topknot::cuda
