#pragma once
// What the kernels of compress/code share: words at any byte, a block's sizes, sums over a row. For .cu
// files.

#include <topknot_kernel.h>

#include "compress/codec/code_bits.h"
#include "compress/codec/cuda/device_block.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {

inline constexpr std::uint64_t kHeaderBytes = sizeof(BlockHeader);
inline constexpr std::uint32_t kLargestFinite = 0x7F7FFFFF;

// `at` is any byte of a block, which begins at a multiple of 16.
__device__ inline void store_u32(std::byte* block, std::uint64_t at, std::uint32_t word) {
  if ((at & 3) == 0) {
    reinterpret_cast<std::uint32_t*>(block)[at / 4] = word;
    return;
  }
  for (int i = 0; i < 4; ++i) block[at + i] = static_cast<std::byte>(word >> (8 * i));
}
__device__ inline void store_u16(std::byte* block, std::uint64_t at, std::uint16_t word) {
  if ((at & 1) == 0) {
    reinterpret_cast<std::uint16_t*>(block)[at / 2] = word;
    return;
  }
  block[at] = static_cast<std::byte>(word);
  block[at + 1] = static_cast<std::byte>(word >> 8);
}
__device__ inline std::uint32_t load_u32(const std::byte* block, std::uint64_t at) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(block) + at / 4;
  const unsigned shift = static_cast<unsigned>(at & 3) * 8;
  const std::uint32_t low = words[0];
  return shift == 0 ? low : low >> shift | words[1] << (32 - shift);
}
__device__ inline std::uint16_t load_u16(const std::byte* block, std::uint64_t at) {
  if ((at & 1) == 0) return reinterpret_cast<const std::uint16_t*>(block)[at / 2];
  return static_cast<std::uint16_t>(static_cast<unsigned>(block[at]) | static_cast<unsigned>(block[at + 1])
                                                                           << 8);
}

// Bytes of a map.
TOPKNOT_HOST_DEVICE std::uint64_t map_bytes(std::uint64_t numel) {
  return (numel + 7) / 8;
}
TOPKNOT_HOST_DEVICE std::uint32_t rice_parts(std::uint64_t count) {
  return static_cast<std::uint32_t>((count + kRicePart - 1) / kRicePart);
}
// Where Rice's bits begin: after b and the parts' ends.
TOPKNOT_HOST_DEVICE std::uint64_t rice_body(std::uint32_t parts) {
  return kHeaderBytes + 1 + 4 * std::uint64_t{parts};
}

// By one thread.
__device__ inline void store_header(const BlockWork& work, const DeviceEntries& entries, std::byte* block) {
  auto* const words = reinterpret_cast<std::uint32_t*>(block);
  words[0] = BlockHeader::kMagic;
  words[1] = BlockHeader::kVersion | (*entries.finite != 0 ? BlockHeader::kFiniteFlag : 0u) << 8 |
             static_cast<std::uint32_t>(work.layout) << 16 | static_cast<std::uint32_t>(work.values) << 24;
  words[2] = work.numel;
  words[3] = *entries.count;
}

__device__ inline std::uint32_t magnitude_bits(float x) {
  return bits_of(x) & 0x7FFFFFFF;
}

// The greatest over a block of kThreads; thread 0 has it.
__device__ inline std::uint32_t block_max(std::uint32_t value) {
  __shared__ std::uint32_t partial[kThreads];
  partial[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half && partial[threadIdx.x + half] > partial[threadIdx.x])
      partial[threadIdx.x] = partial[threadIdx.x + half];
    __syncthreads();
  }
  const std::uint32_t most = partial[0];
  __syncthreads();
  return most;
}

}  // namespace topknot::cuda
