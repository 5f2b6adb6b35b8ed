// Passes that list what exceeds a bound. Each tile fills slots of its own, one block adds up the tiles' counts, and
// a warp a tile moves the slots to where they belong: no order of arrival is ever seen.
#include "compress/select/cuda/gpu_select.h"
#include "compress/select/cuda/gpu_tiles.h"

namespace topknot::cuda {
namespace {

template <Fetch kFetch>
__global__ void __launch_bounds__(kThreads)
    list_tiles_kernel(Accumulate a, std::size_t n, bool aligned, const GpuKey* above, TileMemory tiles) {
  const std::size_t base = std::size_t{blockIdx.x} * kSelectTile;
  float x[kTileShare];
  fetch_tile<kFetch>(a, base, n, aligned, x);
  list_tile(x, base, n, *above, tiles);
}

template <Fetch kFetch>
void list_tiles(cudaStream_t stream, const Accumulate& a, std::size_t n, const GpuKey* above,
                const TileMemory& tiles) {
  launch(list_tiles_kernel<kFetch>, grid_for(n, kSelectTile), kThreads, stream, a, n, aligned(a), above,
         tiles);
}

// One block.
__global__ void __launch_bounds__(kThreads)
    offsets_kernel(std::size_t count, TileMemory tiles, ListStats* stats) {
  constexpr int per = 16;
  std::uint32_t before = 0, flags = 0;
  for (std::size_t start = 0; start < count; start += per * kThreads) {
    const std::size_t first = start + per * threadIdx.x;
    std::uint32_t counts[per], sum = 0;
#pragma unroll
    for (int j = 0; j < per; ++j) {
      counts[j] = first + j < count ? tiles.counts[first + j] : 0;
      flags |= counts[j];
      counts[j] &= ~kBroken;
      sum += counts[j];
    }
    std::uint32_t total;
    std::uint32_t offset = before + block_exclusive_sum(sum, total);
#pragma unroll
    for (int j = 0; j < per; ++j) {
      if (first + j < count) tiles.offsets[first + j] = offset;
      offset += counts[j];
    }
    before += total;
  }
  const bool broken = __syncthreads_or((flags & kBroken) != 0);
  if (threadIdx.x == 0) stats->count = before, stats->finite = broken ? 0 : 1;
}

constexpr int kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const float* u, std::size_t n, const GpuKey* above_at, TileMemory tiles, EntryList list) {
  const std::size_t tile = std::size_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const unsigned lane = threadIdx.x & 31;
  const std::size_t base = tile * kSelectTile;
  if (base >= n || list.stats->count > list.limit) return;
  const std::uint32_t count = tiles.counts[tile] & ~kBroken;
  std::uint32_t place = tiles.offsets[tile];
  if (count <= tiles.slots) {
    for (std::uint32_t i = lane; i < count; i += 32) {
      list.indices[place + i] = tiles.indices[tile * tiles.slots + i];
      list.values[place + i] = tiles.values[tile * tiles.slots + i];
    }
    return;
  }
  const GpuKey above = *above_at;
#pragma unroll 8
  for (std::size_t i = base + lane; i < base + kSelectTile; i += 32) {
    const float x = i < n ? u[i] : 0.0f;
    const bool hit = i < n && key_of(x) > above;
    const unsigned hits = __ballot_sync(kAllLanes, hit);
    if (hit) {
      const std::uint32_t at = place + static_cast<std::uint32_t>(__popc(hits & ((1u << lane) - 1)));
      list.indices[at] = static_cast<std::uint32_t>(i);
      list.values[at] = x;
    }
    place += static_cast<std::uint32_t>(__popc(hits));
  }
}

}  // namespace

void gather_tiles(cudaStream_t stream, const float* u, std::size_t n, const GpuKey* above,
                  const TileMemory& tiles, const EntryList& list) {
  const std::size_t count = ceil_div(n, kSelectTile);
  launch(offsets_kernel, 1, kThreads, stream, count, tiles, list.stats);
  launch(gather_kernel, grid_for(count, kWarps), kThreads, stream, u, n, above, tiles, list);
}

void accumulate_and_list(cudaStream_t stream, const Accumulate& accumulate, std::size_t n,
                         const GpuKey* above, const TileMemory& tiles, const EntryList& list) {
  switch (fetch_of(accumulate)) {
    case Fetch::plain:
      list_tiles<Fetch::plain>(stream, accumulate, n, above, tiles);
      break;
    case Fetch::residual:
      list_tiles<Fetch::residual>(stream, accumulate, n, above, tiles);
      break;
    case Fetch::velocity:
      list_tiles<Fetch::velocity>(stream, accumulate, n, above, tiles);
      break;
    default:
      list_tiles<Fetch::both>(stream, accumulate, n, above, tiles);
      break;
  }
  gather_tiles(stream, accumulate.u, n, above, tiles, list);
}

void list_above(cudaStream_t stream, const float* u, std::size_t n, const GpuKey* above,
                const TileMemory& tiles, const EntryList& list) {
  Accumulate read;
  read.u = const_cast<float*>(u);  // Fetch::read writes nothing
  list_tiles<Fetch::read>(stream, read, n, above, tiles);
  gather_tiles(stream, u, n, above, tiles, list);
}

}  // namespace topknot::cuda
