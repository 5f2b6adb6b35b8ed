#pragma once
// Kernels of the collectives on GPU memory: dist/comm/ordered_sum.h's sums, bit for bit, and copies between ranks whose
// memory this GPU sees.

#include <cuda_runtime_api.h>

#include <cstddef>

namespace topknot::cuda {

enum class SumType { f32, bf16 };
inline constexpr std::size_t size_of(SumType type) {
  return type == SumType::f32 ? 4 : 2;
}

// The same array of every rank, by rank.
inline constexpr int kMostThreadRanks = 128;
struct RankPointers {
  void* at[kMostThreadRanks] = {};
};

// Elements `begin` to `begin` + `count` of every rank's array, added in rank order, written to all of them. No other rank may
// read or write them meanwhile. bfloat16: added as floats and rounded once.
void ordered_sum_to_all(cudaStream_t stream, SumType type, const RankPointers& arrays, int ranks,
                        std::size_t begin, std::size_t count);

// out[i] = blocks[0 * stride + i] + blocks[1 * stride + i] + ..., in that order; `out` lies apart from the blocks.
void ordered_sum_of_blocks(cudaStream_t stream, SumType type, const void* blocks, std::size_t stride,
                           int ranks, void* out, std::size_t count);

// all[r * bytes ...] = the `bytes` at blocks.at[r]; a block that lies there already stays.
void gather_blocks(cudaStream_t stream, const RankPointers& blocks, int ranks, std::size_t bytes,
                   std::byte* all);

}  // namespace topknot::cuda
