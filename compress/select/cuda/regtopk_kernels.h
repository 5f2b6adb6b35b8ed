#pragma once
// What RegTop-k on a GPU adds to Top-k (compress/select/regtopk.cpp): O(k) work on the entries sent in the last step.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/select/cuda/gpu_select.h"
#include "compress/select/cuda/topk_kernels.h"
#include "compress/select/regtopk_score.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// Of a range, in GPU memory.
struct RegTopKControl {
  // Of the last committed step.
  CarriedBound bound;
  double weight = 0;       // of this rank in the average
  std::uint32_t last = 0;  // entries sent
  // Of the step under way.
  CarriedBound next_bound;
  std::uint32_t k = 0;
  bool all = false;        // every entry is sent
  bool fell_back = false;  // the answer comes from the vector
  ListState list = ListState::good;
  MagnitudeKey above = kLargestFinite;  // scores beyond it are known to be listed
  std::uint32_t enough = 0;             // listed scores beyond `above`
  std::uint32_t blocks_done = 0;
};

// The entries sent in the last step, by ascending index: RegTopKControl::last of them.
struct RegTopKLast {
  std::uint32_t* indices = nullptr;
  double* own = nullptr;      // w p
  double* surplus = nullptr;  // avg - w p
  float* kept = nullptr;      // scratch: what stood in u where scores stand for a while
  std::uint32_t capacity = 0;
};

// By range, in GPU memory.
struct RegTopKWork {
  RegTopKControl* controls;
  const RegTopKLast* last;
};

// Lists what may be among the k largest scores, puts scores over the listed values and takes the k largest; where the
// list does not hold them, scores stand in u for a while.
void regtopk_select(cudaStream_t stream, const RegTopKScore& rule, const SelectRanges& ranges,
                    const RegTopKWork& work, const Accumulate& accumulate, const StepParameters* parameters);
// Where the status is good: keeps what was sent, and what the average made of it.
void regtopk_commit(cudaStream_t stream, const SelectRanges& ranges, const RegTopKWork& work,
                    const StepStatus* status, const DeviceOutcome& outcome);

}  // namespace topknot::cuda
