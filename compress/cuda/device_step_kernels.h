#pragma once
// What a sparse step does on a GPU between selection, code and memory (compress/cuda/device_sparse.cpp).

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/codec/cuda/device_codec.h"
#include "compress/select/cuda/gpu_select.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// The list that the ranges' selections make, in GPU memory.
struct JoinedList {
  std::uint32_t* starts = nullptr;  // by range: where its entries begin
  std::uint32_t* count = nullptr;   // of all: 0 where a range is not finite
  std::uint32_t* finite = nullptr;
};

// Finds out where the ranges' entries begin; adds to what the status says of selections.
void join_ranges(cudaStream_t stream, const SelectRanges& ranges, const JoinedList& joined,
                 StepStatus* status);
// The list: positions in the group and values.
void concatenate(cudaStream_t stream, const SelectRanges& ranges, const JoinedList& joined,
                 std::uint32_t* indices, float* values);
// This rank's values as decoded, as a list (`list`) and where the selected ones are (`by_slot`).
void take_own(cudaStream_t stream, const SelectRanges& ranges, const JoinedList& joined,
              const StepParameters* step, const float* decoded, std::size_t capacity, float* list,
              float* by_slot);

// Whether the step's entries can be averaged: every rank finite and undamaged, and the sum unable to
// overflow. Keeps the weights, and behind them this rank's own.
void judge(cudaStream_t stream, const DecodedStats* stats, int ranks, const float* weights,
           const StepParameters* step, float* kept_weights, StepStatus* status);

// The average of sparse contributions, bit for bit that of compress/sparse.h.
// Overwrites `average`, n floats, where the status is good; else leaves it. `lists`: of `ranks` ranks, room
// for `capacity` entries each. `weights`: one per rank, in GPU memory.
void average_entries(cudaStream_t stream, const StepStatus* status, const DecodedEntries& lists,
                     std::size_t capacity, int ranks, const float* weights, float* average, std::size_t n);

}  // namespace topknot::cuda
