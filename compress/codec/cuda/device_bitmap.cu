// The layout bitmap.
#include <topknot_kernel.h>

#include "compress/codec/cuda/device_codec.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr std::uint32_t kEach = kBitmapChunk / 32 / kThreads;  // words that a thread reads

// Over a map of zeros.
__global__ void __launch_bounds__(kThreads)
    write_bitmap_kernel(BlockWork work, DeviceEntries entries, std::byte* block) {
  await_previous();
  const std::uint32_t count = *entries.count;
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i == 0) {
    store_header(work, entries, block);
    *work.place = BlockPlace{kHeaderBytes + (count == 0 ? 0 : map_bytes(work.numel)), 0, 0};
  }
  if (i >= count) return;
  const std::uint32_t index = entries.indices[i];
  atomicOr(reinterpret_cast<std::uint32_t*>(block + kHeaderBytes) + index / 32, 1u << (index % 32));
}

// The bits of positions that a thread's word `w` holds: values may follow the map in the same word.
__device__ std::uint32_t map_word(const std::byte* block, std::uint64_t w, std::uint64_t bits) {
  if (32 * w >= bits) return 0;
  const std::uint32_t word = reinterpret_cast<const std::uint32_t*>(block + kHeaderBytes)[w];
  return bits - 32 * w >= 32 ? word : word & ((1u << (bits - 32 * w)) - 1);
}

__global__ void __launch_bounds__(kThreads)
    count_bits_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  await_previous();
  const std::size_t rank = blockIdx.y;
  if (out.stats[rank].count == 0) return;
  const std::byte* const block = blocks + rank * work.block_bytes;
  const std::uint64_t first = (std::uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  std::uint32_t bits = 0, total = 0;
  for (std::uint32_t w = 0; w < kEach; ++w) {
    const std::uint32_t word = map_word(block, first + w, work.numel);
    bits += static_cast<std::uint32_t>(__popc(word));
    if (word != map_word(block, first + w, 8 * map_bytes(work.numel))) out.stats[rank].damaged = 1;
  }
  block_exclusive_sum(bits, total);
  if (threadIdx.x == 0) work.sizes[rank * work.parts + blockIdx.x] = total;
}

// One block of threads per rank.
__global__ void __launch_bounds__(kThreads) chunk_starts_kernel(BlockWork work, DecodedEntries out) {
  await_previous();
  const std::size_t rank = blockIdx.x;
  const std::uint32_t count = out.stats[rank].count;
  if (count == 0) return;
  const std::uint32_t* const sizes = work.sizes + rank * work.parts;
  std::uint32_t* const starts = work.starts + rank * work.parts;
  std::uint32_t base = 0;
  for (std::uint32_t first = 0; first < work.parts; first += kThreads) {
    const std::uint32_t chunk = first + threadIdx.x;
    std::uint32_t total = 0;
    const std::uint32_t before = base + block_exclusive_sum(chunk < work.parts ? sizes[chunk] : 0u, total);
    if (chunk < work.parts) starts[chunk] = before;
    base += total;
  }
  if (threadIdx.x == 0 && base != count) out.stats[rank].damaged = 1;
}

__global__ void __launch_bounds__(kThreads)
    read_bitmap_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  await_previous();
  const std::size_t rank = blockIdx.y;
  if (out.stats[rank].count == 0 || out.stats[rank].damaged != 0) return;
  const std::byte* const block = blocks + rank * work.block_bytes;
  const std::uint64_t first = (std::uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  std::uint32_t words[kEach], bits = 0, total = 0;
  for (std::uint32_t w = 0; w < kEach; ++w) {
    words[w] = map_word(block, first + w, work.numel);
    bits += static_cast<std::uint32_t>(__popc(words[w]));
  }
  std::uint32_t* to = out.indices + rank * work.capacity + work.starts[rank * work.parts + blockIdx.x] +
                      block_exclusive_sum(bits, total);
  for (std::uint32_t w = 0; w < kEach; ++w)
    for (std::uint32_t word = words[w]; word != 0; word &= word - 1)
      *to++ = static_cast<std::uint32_t>(32 * (first + w)) +
              static_cast<std::uint32_t>(__ffs(static_cast<int>(word)) - 1);
}

}  // namespace

void write_bitmap(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries,
                  std::byte* block) {
  launch(write_bitmap_kernel, grid_for(work.capacity, kThreads), kThreads, stream, work, entries, block);
}

void read_bitmap(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
                 const DecodedEntries& out) {
  const auto ranks = static_cast<unsigned>(work.ranks);
  dim3 chunks(work.parts);
  chunks.y = ranks;
  launch(count_bits_kernel, chunks, kThreads, stream, work, blocks, out);
  launch(chunk_starts_kernel, dim3(ranks), kThreads, stream, work, out);
  launch(read_bitmap_kernel, chunks, kThreads, stream, work, blocks, out);
}

}  // namespace topknot::cuda
