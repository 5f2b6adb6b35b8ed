#pragma once
// The kernels of quantising methods on a GPU: compress/quantise/compressor.h, pass by pass, with its bits. Signs and levels.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/codec/cuda/device_block.h"
#include "compress/quantise/block.h"
#include "nn/core/rng.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// What compress/quantise/block.h calls a format, with the cells' ends in GPU memory.
struct QuantisedFormat {
  quantise::Kind kind = quantise::Kind::sign;
  std::uint32_t bits = 1, levels = 1, numel = 0, cells = 0;
  const std::uint32_t* ends = nullptr;
  std::uint64_t block_bytes = 0;  // of a rank, a multiple of 16

  TOPKNOT_HOST_DEVICE std::uint64_t codes_at() const {
    return sizeof(quantise::BlockHeader) + 4 * std::uint64_t{cells};
  }
};

// A piece of a cell over which magnitudes are summed in one order: signs are summed by chunks, levels by whole cells.
struct QuantisedPiece {
  std::uint32_t cell, begin, end;
};

// u = gradient + residual over the gradient, or the gradient as it is (null). sums: of each piece, of magnitudes (sign) or of
// squares (levels). *broken: 1 where u is not finite.
void quantise_sums(cudaStream_t stream, const QuantisedFormat& format, float* u, const float* residual,
                   const QuantisedPiece* pieces, std::uint32_t count, double* sums, std::uint32_t* broken);
// The cells' scales. `first`: of each cell, and behind the last: where its pieces begin. *broken: 1 where one is not finite.
void quantise_scales(cudaStream_t stream, const QuantisedFormat& format, const double* sums,
                     const std::uint32_t* first, float* scales, std::uint32_t* broken);
// This rank's block, zeros behind it. `rng`: of the method's seed; `offset`: of the group in the model.
void write_quantised(cudaStream_t stream, const QuantisedFormat& format, const float* u, const float* scales,
                     const std::uint32_t* broken, const StepParameters* step, const PhiloxStream& rng,
                     std::uint64_t offset, std::byte* block, StepStatus* status);

// What is wrong with the blocks; `stats`: one per rank, count is not used.
void check_quantised(cudaStream_t stream, const QuantisedFormat& format, const std::byte* blocks, int ranks,
                     DecodedStats* stats);
// Where the status is good: the average of the ranks' values over `average`, and u -= this rank's values where there is a
// residual. Else the residual over u. `average` is the residual's memory, or u's where there is none (null).
void commit_quantised(cudaStream_t stream, const QuantisedFormat& format, const std::byte* blocks, int ranks,
                      const float* weights, const StepParameters* step, const StepStatus* status, float* u,
                      float* residual);

}  // namespace topknot::cuda
