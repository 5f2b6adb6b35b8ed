#pragma once
// What a sparse step does on a GPU between selection, code and memory (compress/cuda/device_sparse.h). C++17.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/codec/cuda/device_block.h"
#include "nn/core/cuda/step_parameters.h"

namespace topknot::cuda {

// DeviceSelected::Stats, in the same order.
struct SegmentStats {
  std::uint32_t count, finite, over;
  float threshold;
};

// The segments' selections, each in its own stretch of one array, and the list that they make.
struct Segments {
  std::uint32_t number = 0;
  std::uint32_t longest = 0;              // the greatest capacity of a segment
  const std::uint32_t* begins = nullptr;  // where segments begin in the group
  const std::uint32_t* slots = nullptr;   // where their entries begin in `indices` and `values`
  const SegmentStats* stats = nullptr;
  const std::uint32_t* indices = nullptr;  // relative to the segment
  const float* values = nullptr;
  std::uint32_t* starts = nullptr;  // where their entries begin in the list
  std::uint32_t* count = nullptr;   // of the list: 0 where a segment is not finite
  std::uint32_t* finite = nullptr;
};

// starts, count and finite; adds to what the status says of selections.
void join_segments(cudaStream_t stream, const Segments& segments, StepStatus* status);
// The list: positions in the group and values.
void concatenate(cudaStream_t stream, const Segments& segments, std::uint32_t* indices, float* values);
// This rank's values as decoded, as a list (`list`) and by segment (`by_slot`, at the segments' slots).
void take_own(cudaStream_t stream, const Segments& segments, const StepParameters* step, const float* decoded,
              std::size_t capacity, float* list, float* by_slot);

// Whether the step's entries can be averaged: every rank finite and undamaged, and the sum unable to
// overflow. Keeps the weights, and behind them this rank's own.
void judge(cudaStream_t stream, const DecodedStats* stats, int ranks, const float* weights,
           const StepParameters* step, float* kept_weights, StepStatus* status);

// The average of sparse contributions, bit for bit that of compress/average.h.
// Overwrites `average`, n floats, where the status is good; else leaves it. `lists`: of `ranks` ranks, room
// for `capacity` entries each. `weights`: one per rank, in GPU memory.
void average_entries(cudaStream_t stream, const StepStatus* status, const DecodedEntries& lists,
                     std::size_t capacity, int ranks, const float* weights, float* average, std::size_t n);

}  // namespace topknot::cuda
