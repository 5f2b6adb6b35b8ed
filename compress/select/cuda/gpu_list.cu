// Passes that list what exceeds a bound. Each tile fills slots of its own, one block adds up the tiles' counts, and
// a warp a tile moves the slots to where they belong: no order of arrival is ever seen.
#include "compress/select/cuda/gpu_select.h"
#include "compress/select/cuda/gpu_tiles.h"

namespace topknot::cuda {
namespace {

template <Fetch kFetch>
__global__ void __launch_bounds__(kThreads)
    list_tiles_kernel(Accumulate accumulate, bool aligned, SelectRanges ranges) {
  const RangeBlock block = range_block(ranges.tiles);
  const SelectRange& range = ranges.range[block.range];
  const std::size_t begin = range.begin, n = range.n, base = std::size_t{block.index} * kSelectTile;
  float x[kTileShare];
  fetch_tile<kFetch>(accumulate.from(begin), base, n, aligned && begin % 4 == 0, x);
  list_tile(x, base, n, ranges.above[block.range], range.tiles);
}

// A block per range.
__global__ void __launch_bounds__(kThreads) offsets_kernel(SelectRanges ranges) {
  const SelectRange& range = ranges.range[blockIdx.x];
  const TileMemory tiles = range.tiles;
  const std::size_t count = (range.n + kSelectTile - 1) / kSelectTile;
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
  if (threadIdx.x == 0) *range.list.stats = {before, broken ? 0u : 1u};
}

constexpr int kWarps = kThreads / 32;

// A warp per tile.
__global__ void __launch_bounds__(kThreads) gather_kernel(const float* group, SelectRanges ranges) {
  const std::size_t warp = std::size_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (warp >= ranges.tiles.count) return;
  const std::uint32_t at = ranges.tiles.range ? ranges.tiles.range[warp] : 0;
  const std::size_t tile = warp - (ranges.tiles.range ? ranges.tiles.first[at] : 0);
  const SelectRange& range = ranges.range[at];
  const EntryList list = range.list;
  if (list.stats->count > list.limit) return;
  const TileMemory tiles = range.tiles;
  const unsigned lane = threadIdx.x & 31;
  const float* const u = group + range.begin;
  const std::size_t n = range.n, base = tile * kSelectTile;
  const std::uint32_t count = tiles.counts[tile] & ~kBroken;
  std::uint32_t place = tiles.offsets[tile];
  if (count <= tiles.slots) {
    for (std::uint32_t i = lane; i < count; i += 32) {
      list.indices[place + i] = tiles.indices[tile * tiles.slots + i];
      list.values[place + i] = tiles.values[tile * tiles.slots + i];
    }
    return;
  }
  const MagnitudeKey above = ranges.above[at];
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

void gather_tiles(cudaStream_t stream, const SelectRanges& ranges, const float* u) {
  launch(offsets_kernel, ranges.count, kThreads, stream, ranges);
  launch(gather_kernel, grid_for(ranges.tiles.count, kWarps), kThreads, stream, u, ranges);
}

void accumulate_and_list(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate) {
  with_fetch(accumulate, [&](auto fetch) {
    launch(list_tiles_kernel<fetch()>, ranges.tiles.count, kThreads, stream, accumulate, aligned(accumulate),
           ranges);
  });
  gather_tiles(stream, ranges, accumulate.u);
}

}  // namespace topknot::cuda
