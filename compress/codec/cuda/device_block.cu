// Headers, and the layout raw.
#include "compress/codec/cuda/device_block_tools.h"

namespace topknot::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    write_raw_kernel(BlockWork work, DeviceEntries entries, std::byte* block) {
  const std::uint32_t count = *entries.count;
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i == 0) {
    store_header(work, entries, block);
    *work.place = BlockPlace{kHeaderBytes + 4 * std::uint64_t{count}, 0, 0};
  }
  if (i < count) reinterpret_cast<std::uint32_t*>(block + kHeaderBytes)[i] = entries.indices[i];
}

// One block of threads per rank. What it accepts bounds every later access.
__global__ void __launch_bounds__(kThreads)
    read_headers_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  const std::size_t rank = blockIdx.x;
  const std::byte* const block = blocks + rank * work.block_bytes;
  const auto* const words = reinterpret_cast<const std::uint32_t*>(block);
  const std::uint32_t head = words[1], flags = head >> 8 & 0xFF, count = words[3];
  const std::uint32_t coded = BlockHeader::kVersion | static_cast<std::uint32_t>(work.layout) << 16 |
                              static_cast<std::uint32_t>(work.values) << 24;
  bool good = words[0] == BlockHeader::kMagic && (head & 0xFFFF00FFu) == coded &&
              (flags & ~std::uint32_t{BlockHeader::kFiniteFlag}) == 0 && words[2] == work.numel &&
              count <= work.capacity && count <= work.numel && (flags != 0 || count == 0);
  std::uint64_t values_at = kHeaderBytes;
  if (good && count > 0 && work.layout == Layout::raw) values_at += 4 * std::uint64_t{count};
  if (good && count > 0 && work.layout == Layout::bitmap) values_at += map_bytes(work.numel);
  if (good && count > 0 && work.layout == Layout::rice) {
    const std::uint32_t parts = rice_parts(count);
    const std::uint64_t body = rice_body(parts);
    good = body <= work.block_bytes &&
           static_cast<unsigned>(block[kHeaderBytes]) == rice_parameter(count, work.numel);
    int wrong = 0;
    std::uint64_t last = 0;
    for (std::uint32_t part = threadIdx.x; good && part < parts; part += kThreads) {
      const std::uint64_t before = part == 0 ? 0 : load_u32(block, rice_body(part - 1));
      const std::uint64_t end = load_u32(block, rice_body(part)), begin = (before + 7) / 8;
      if (end < 8 * begin || body + (end + 7) / 8 > work.block_bytes) wrong = 1;
    }
    good = good && __syncthreads_or(wrong) == 0;
    if (good) last = load_u32(block, rice_body(parts - 1));
    values_at = body + (last + 7) / 8;
  }
  good = good && values_at + value_bytes(work.values, count) <= work.block_bytes;
  if (threadIdx.x != 0) return;
  out.stats[rank] = DecodedStats{good ? count : 0, flags & 1, good ? 0u : 1u, 0};
  work.place[rank] = BlockPlace{values_at, 0, 0};
}

__global__ void __launch_bounds__(kThreads)
    read_raw_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  const std::size_t rank = blockIdx.y;
  const auto* const indices =
      reinterpret_cast<const std::uint32_t*>(blocks + rank * work.block_bytes + kHeaderBytes);
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= out.stats[rank].count) return;
  const std::uint32_t index = indices[i];
  if (index >= work.numel || (i > 0 && indices[i - 1] >= index)) out.stats[rank].damaged = 1;
  out.indices[rank * work.capacity + i] = index;
}

}  // namespace

void write_raw(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block) {
  launch(write_raw_kernel, grid_for(work.capacity, kThreads), kThreads, stream, work, entries, block);
}

void read_headers(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
                  const DecodedEntries& out) {
  launch(read_headers_kernel, dim3(static_cast<unsigned>(work.ranks)), kThreads, stream, work, blocks, out);
}

void read_raw(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
              const DecodedEntries& out) {
  dim3 grid = grid_for(work.capacity, kThreads);
  grid.y = static_cast<unsigned>(work.ranks);
  launch(read_raw_kernel, grid, kThreads, stream, work, blocks, out);
}

}  // namespace topknot::cuda
