#pragma once
// Which range a block serves; a digit of a k-th key; a tile of elements in the registers of a block, loaded or
// accumulated, and listed. For .cu files.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "compress/memory/accumulate.h"
#include "compress/select/cuda/device_selector.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {

// This block's index among the `count` blocks that serve its range.
struct RangeBlock {
  std::uint32_t range, index, count;
};
__device__ inline RangeBlock range_block(const RangeBlocks& blocks) {
  if (!blocks.range) return {0, blockIdx.x, gridDim.x};
  const std::uint32_t range = blocks.range[blockIdx.x], first = blocks.first[range];
  return {range, blockIdx.x - first, blocks.first[range + 1] - first};
}

// A grid with a thread per range, and this thread's.
inline dim3 thread_per_range(const SelectRanges& ranges) {
  return grid_for(ranges.count, kThreads);
}
__device__ inline std::uint32_t range_of_thread() {
  return blockIdx.x * kThreads + threadIdx.x;
}

// The knowledge of the k-th key after some digits.
struct Radix {
  MagnitudeKey prefix;   // its digits so far
  std::uint32_t higher;  // keys above every key with these digits
};

// Picks the next digit, of which `counts` says how many keys have which value; the whole block calls.
template <int kBlock = kThreads>
__device__ Radix pick_digit(const std::uint32_t* counts, int width, std::uint32_t k, const Radix& before) {
  __shared__ Radix picked;
  const int per = (1 << width) / kBlock;
  const int top = (1 << width) - 1 - static_cast<int>(threadIdx.x) * per;  // this thread's highest value
  std::uint32_t mine = 0;
  for (int i = 0; i < per; ++i) mine += counts[top - i];
  std::uint32_t total;
  std::uint32_t higher = before.higher + block_exclusive_sum<kBlock>(mine, total);
  if (higher < k && k <= higher + mine) {
    int digit = top;
    for (; higher + counts[digit] < k; --digit) higher += counts[digit];
    picked = {static_cast<MagnitudeKey>((before.prefix << width) | digit), higher};
  }
  __syncthreads();
  const Radix result = picked;
  __syncthreads();
  return result;
}

// A thread's share of a tile: four quads of neighbours, element c of quad q at quad_at(base, q) + c.
inline constexpr int kQuads = 4;
inline constexpr int kTileShare = 4 * kQuads;
static_assert(kTileShare * kThreads == kSelectTile, "a block holds a tile");
__device__ inline std::size_t quad_at(std::size_t base, int quad) {
  return base + static_cast<std::size_t>(quad) * 4 * kThreads + 4 * threadIdx.x;
}

enum class Fetch { read, plain, residual, velocity, both };  // both: residual and velocity

// Loads come before anything is stored, as far as registers allow: a thread that waited for every element's
// load alone would leave the memory idle. The formulas are Accumulate's, over copies in registers.
template <Fetch kFetch, int kBatch, bool kAligned>
__device__ void fetch_quads(const Accumulate& a, std::size_t base, int first, float* x) {
  constexpr bool residual = kFetch == Fetch::residual || kFetch == Fetch::both;
  constexpr bool velocity = kFetch == Fetch::velocity || kFetch == Fetch::both;
  float r[4 * kBatch], v[4 * kBatch], moved[4 * kBatch];
#pragma unroll
  for (int q = 0; q < kBatch; ++q) {
    const std::size_t at = quad_at(base, first + q);
    load_quad<kAligned>(a.u + at, x + 4 * q);
    if (residual) load_quad<kAligned>(a.residual + at, r + 4 * q);
    if (velocity) load_quad<kAligned>(a.velocity + at, v + 4 * q);
  }
  if (kFetch == Fetch::read) return;
  Accumulate local = a;
  local.u = x;
  local.residual = residual ? r : nullptr;
  local.velocity = velocity ? v : nullptr;
  local.next_velocity = velocity ? moved : nullptr;
#pragma unroll
  for (int i = 0; i < 4 * kBatch; ++i) local(static_cast<std::size_t>(i));
#pragma unroll
  for (int q = 0; q < kBatch; ++q) {
    const std::size_t at = quad_at(base, first + q);
    store_quad<kAligned>(a.u + at, x + 4 * q);
    if (velocity) store_quad<kAligned>(a.next_velocity + at, moved + 4 * q);
  }
}

// This thread's share of the tile at `base` of n elements, or 0. `aligned`: all vectors start at 16 bytes.
template <Fetch kFetch>
__device__ void fetch_tile(const Accumulate& a, std::size_t base, std::size_t n, bool aligned,
                           float (&x)[kTileShare]) {
  if (base + kSelectTile <= n) {
    constexpr int batch = kFetch == Fetch::both || kFetch == Fetch::velocity ? 2 : kQuads;
#pragma unroll
    for (int q = 0; q < kQuads; q += batch)
      if (aligned)
        fetch_quads<kFetch, batch, true>(a, base, q, x + 4 * q);
      else
        fetch_quads<kFetch, batch, false>(a, base, q, x + 4 * q);
    return;
  }
#pragma unroll
  for (int q = 0; q < kQuads; ++q)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const std::size_t at = quad_at(base, q) + static_cast<std::size_t>(c);
      x[4 * q + c] = at >= n ? 0.0f : kFetch == Fetch::read ? a.u[at] : a(at);
    }
}

// Calls work(std::integral_constant<Fetch, ...>) with what the accumulation needs.
void with_fetch(const Accumulate& a, const auto& work) {
  if (a.velocity && a.residual)
    work(std::integral_constant<Fetch, Fetch::both>());
  else if (a.velocity)
    work(std::integral_constant<Fetch, Fetch::velocity>());
  else if (a.residual)
    work(std::integral_constant<Fetch, Fetch::residual>());
  else
    work(std::integral_constant<Fetch, Fetch::plain>());
}
inline bool aligned(const Accumulate& a) {
  const auto at = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p); };
  return ((at(a.u) | at(a.residual) | at(a.velocity) | at(a.next_velocity)) & 15) == 0;
}

// Lists what of the tile exceeds `above` in the tile's slots and writes its count; the top bit: a NaN or Inf
// was there. What has no room there comes, all of the tile's, into `more` if that is not null, behind what other
// tiles have there; the tile's first slot says where. The whole block calls.
inline constexpr std::uint32_t kBroken = 0x80000000u;
__device__ inline void list_tile(const float (&x)[kTileShare], std::size_t base, std::size_t n,
                                 MagnitudeKey above, const TileMemory& tiles, const EntryList* more) {
  const std::size_t tile = base / kSelectTile;
  unsigned hits = 0;
  bool broken = false;
#pragma unroll
  for (int q = 0; q < kQuads; ++q)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const MagnitudeKey key = key_of(x[4 * q + c]);
      const bool there = quad_at(base, q) + static_cast<std::size_t>(c) < n;
      if (there && key > above) hits |= 1u << (4 * q + c);
      broken |= key > kLargestFinite;
    }
  if (!__syncthreads_or(hits != 0)) {
    if (threadIdx.x == 0) tiles.counts[tile] = 0;
    return;
  }
  const bool any_broken = __syncthreads_or(broken);
  // Quads are ordered before threads: one sum of four counts, 16 bits each.
  std::uint64_t mine = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q)
    mine |= static_cast<std::uint64_t>(__popc((hits >> (4 * q)) & 15u)) << (16 * q);
  std::uint64_t total;
  const std::uint64_t before = block_exclusive_sum(mine, total);
  std::uint32_t start = 0, slots = tiles.slots, *indices = tiles.indices + tile * slots;
  float* values = tiles.values + tile * slots;
  const auto count = static_cast<std::uint32_t>(total * 0x0001000100010001u >> 48);
  if (more && count > slots) {
    __shared__ std::uint32_t place;
    if (threadIdx.x == 0) *indices = place = atomicAdd(tiles.calls + 1, count);
    __syncthreads();
    slots = place + count <= more->limit ? count : 0;
    indices = more->indices + place, values = more->values + place;
  }
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    std::uint32_t place = start + static_cast<std::uint32_t>((before >> (16 * q)) & 0xffff);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if ((hits >> (4 * q + c)) & 1u) {
        if (place < slots) {
          indices[place] = static_cast<std::uint32_t>(quad_at(base, q) + static_cast<std::size_t>(c));
          values[place] = x[4 * q + c];
        }
        ++place;
      }
    start += static_cast<std::uint32_t>((total >> (16 * q)) & 0xffff);
  }
  if (threadIdx.x == 0) tiles.counts[tile] = count | (any_broken ? kBroken : 0);
}

// After a block has listed its tiles: in the last block of the range finds out where the tiles' entries begin, and
// the list's stats, and is true. The whole block calls.
__device__ inline bool finish_list(const SelectRange& range, const RangeBlock& block) {
  const TileMemory tiles = range.tiles;
  if (!is_last_block(tiles.calls, block.count)) return false;
  const std::size_t count = (range.n + kSelectTile - 1) / kSelectTile;
  constexpr int per = 4;
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
  return true;
}

// The lists, ascending, once finish_list() was true for each.
void gather_tiles(cudaStream_t stream, const SelectRanges& ranges, const float* u);

// A method's part of the pass that lists. bound(): a range's bound, at most kLargestFinite, so that NaN and
// Inf are always found; with kLargestFinite nothing of a finite vector is listed. listed(): one thread calls
// it once the list's stats are known. This default leaves bounds and decisions to other kernels.
struct Listing {
  __device__ MagnitudeKey bound(const SelectRanges& ranges, std::uint32_t range) const {
    return ranges.above[range];
  }
  __device__ void listed(const SelectRanges&, std::uint32_t) const {}
};

// What a pass that lists is for: gather_tiles(), or finish_topk(), also if the first list was not good.
enum class Then { gather, finish, finish_again };

template <Fetch kFetch, Then kThen, class Method>
__global__ void __launch_bounds__(kThreads)
    list_tiles_kernel(Accumulate accumulate, bool aligned, SelectRanges ranges, Method method) {
  await_previous();
  if (kThen == Then::finish_again && (ranges.choices->skip || !ranges.choices->whole)) return;
  const RangeBlock block = range_block(ranges.tiles);
  const SelectRange& range = ranges.range[block.range];
  const std::size_t begin = range.begin, n = range.n, base = std::size_t{block.index} * kSelectTile;
  const MagnitudeKey above = method.bound(ranges, block.range);
  float x[kTileShare];
  fetch_tile<kFetch>(accumulate.from(begin), base, n, aligned && begin % 4 == 0, x);
  list_tile(x, base, n, above, range.tiles, kThen == Then::gather ? nullptr : &range.list);
  if (!finish_list(range, block) || threadIdx.x != 0) return;
  range.tiles.calls[1] = 0;
  ranges.above[block.range] = above;  // for gather_tiles()
  method.listed(ranges, block.range);
}

// Makes u[i] = accumulate(i) and lists what exceeds the method's bounds.
template <Then kThen = Then::gather, class Method>
void accumulate_and_list(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
                         const Method& method) {
  with_fetch(accumulate, [&](auto fetch) {
    launch(list_tiles_kernel<fetch(), kThen, Method>, ranges.tiles.count, kThreads, stream, accumulate,
           aligned(accumulate), ranges, method);
  });
  if (kThen == Then::gather) gather_tiles(stream, ranges, accumulate.u);
}

// If the list is not good, lists u again: what has the k-th key's upper 11 bits, or higher ones.
void list_again(cudaStream_t stream, const SelectRanges& ranges, float* u);

// After accumulate_and_list<Then::finish>() of a single range, in place of take_largest(): three launches, of which
// two return at once if the list is good. Takes the k largest, and writes ranges.joined.message, in one block, which
// reads the list five times, 4 bytes an entry: slow if it is long. If it is not good: 8 bytes per element more. If more
// than the list's limit have the k-th key's upper 11 bits or higher ones (many equal magnitudes, as zeros), the
// block reads u in place of the list: 20 bytes per element, at the rate of one multiprocessor.
void finish_topk(cudaStream_t stream, const SelectRanges& ranges, float* u);

}  // namespace topknot::cuda
