// The second half of passes that list what exceeds a bound: each tile has filled slots of its own, the last block has
// added up the tiles' counts, and a warp a tile moves the slots to where they belong, so that no order of arrival is
// ever seen. Radix selection, ordered compaction of what it selects, and the memory of a group's ranges.
#include <topknot_kernel.h>

#include <algorithm>
#include <bit>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "nn/base/check.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kWarps = kThreads / 32;

// A warp per tile.
__global__ void __launch_bounds__(kThreads) gather_kernel(const float* group, SelectRanges ranges) {
  await_previous();
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

constexpr int kDigits = 3;
// Digit d of a key: `width` bits from `shift` on, highest first.
__device__ int digit_shift(int d) {
  return d == 0 ? 20 : d == 1 ? 10 : 0;
}
__device__ int digit_width(int d) {
  return d == 0 ? 11 : 10;
}
__device__ int digit_offset(int d) {
  return d == 0 ? 0 : 1024 + 1024 * d;
}

// A source as this block sees it.
struct Share {
  Source from;
  std::size_t begin, end;
};
__device__ Share share_of(const Choice& choice, const SelectRange& range, const RangeBlock& block,
                          const Source* lists, const float* u) {
  Share share;
  if (choice.whole)
    share.from = {u + range.begin, nullptr, nullptr, range.n};
  else if (lists)
    share.from = lists[block.range];
  else
    share.from = {range.list.values, range.list.indices, &range.list.stats->count, range.list.limit};
  const std::size_t count = share.from.count ? *share.from.count : share.from.size;
  std::size_t per = (count + block.count - 1) / block.count;
  per = per < kLeastShare ? kLeastShare : (per + kThreads - 1) / kThreads * kThreads;
  share.begin = block.index * per < count ? block.index * per : count;
  share.end = share.begin + per < count ? share.begin + per : count;
  return share;
}

// The state before digit d is counted. `keep`: stores it in `radix` for the next kernel.
__device__ Radix radix_before(int d, const LargestMemory& memory, std::uint32_t k, bool keep) {
  if (d == 0) return {0, 0};
  Radix before = {0, 0};
  if (d > 1) before = {static_cast<MagnitudeKey>(memory.radix[2 * (d - 1)]), memory.radix[2 * (d - 1) + 1]};
  const Radix now = pick_digit(memory.digits + digit_offset(d - 1), digit_width(d - 1), k, before);
  if (keep && threadIdx.x == 0 && d < kDigits) {
    memory.radix[2 * d] = static_cast<std::uint32_t>(now.prefix);
    memory.radix[2 * d + 1] = now.higher;
  }
  return now;
}

__global__ void __launch_bounds__(kThreads)
    count_digit_kernel(int d, bool only_whole, SelectRanges ranges, const Source* lists, const float* u,
                       const Choice* choices) {
  await_previous();
  __shared__ std::uint32_t counts[2048];
  const RangeBlock block = range_block(ranges.shares);
  const Choice choice = choices[block.range];
  if (choice.skip || choice.known || (only_whole && !choice.whole)) return;
  const SelectRange& range = ranges.range[block.range];
  const LargestMemory memory = range.largest;
  const Share share = share_of(choice, range, block, lists, u);
  if (share.begin == share.end && block.index > 0) return;
  const Radix radix = radix_before(d, memory, choice.k, block.index == 0);
  const int bins = 1 << digit_width(d);
  for (int bin = static_cast<int>(threadIdx.x); bin < bins; bin += kThreads) counts[bin] = 0;
  __syncthreads();
  const int shift = digit_shift(d), width = digit_width(d);
  const float* values = share.from.values;
#pragma unroll 4
  for (std::size_t i = share.begin + threadIdx.x; i < share.end; i += kThreads) {
    const MagnitudeKey key = key_of(values[i]) >> shift;
    if ((key >> width) == radix.prefix) atomicAdd(&counts[key & (bins - 1)], 1u);
  }
  __syncthreads();
  std::uint32_t* all = memory.digits + digit_offset(d);
  for (int bin = static_cast<int>(threadIdx.x); bin < bins; bin += kThreads)
    if (counts[bin] > 0) atomicAdd(&all[bin], counts[bin]);
}

__device__ void clear_digits(const LargestMemory& memory) {
  for (std::size_t i = threadIdx.x; i < kDigitCounts; i += kThreads) memory.digits[i] = 0;
}

// A block per range.
__global__ void __launch_bounds__(kThreads) finish_kth_kernel(SelectRanges ranges, Choice* choices) {
  await_previous();
  Choice& choice = choices[blockIdx.x];
  if (choice.skip) return;
  const LargestMemory memory = ranges.range[blockIdx.x].largest;
  const Radix radix = radix_before(kDigits, memory, choice.k, false);
  clear_digits(memory);
  if (threadIdx.x == 0) choice.kth = radix.prefix, choice.greater = radix.higher;
}

// How many of this block's share are above the bound, and how many at it.
__global__ void __launch_bounds__(kThreads) count_taken_kernel(SelectRanges ranges, const float* u) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  const Choice& choice = ranges.choices[block.range];  // the first block writes what it has found
  if (choice.skip) return;
  const SelectRange& range = ranges.range[block.range];
  const Share share = share_of(choice, range, block, nullptr, u);
  std::uint32_t* mine = range.largest.blocks + 2 * block.index;
  if (share.begin == share.end && block.index > 0) {
    if (threadIdx.x < 2) mine[threadIdx.x] = 0;
    return;
  }
  MagnitudeKey bound = choice.bound;
  if (!choice.known) {
    const Radix radix = radix_before(kDigits, range.largest, choice.k, false);
    bound = radix.prefix;
    if (block.index == 0 && threadIdx.x == 0) {
      Choice& found = ranges.choices[block.range];
      found.kth = bound;
      found.greater = radix.higher;
      if (choice.of_kth != 0)
        range.stats->threshold = static_cast<float>(choice.of_kth * static_cast<double>(magnitude_of(bound)));
    }
  }
  std::uint32_t greater = 0, equal = 0;
  const float* values = share.from.values;
#pragma unroll 4
  for (std::size_t i = share.begin + threadIdx.x; i < share.end; i += kThreads) {
    const MagnitudeKey key = key_of(values[i]);
    greater += key > bound;
    equal += key == bound;
  }
  greater = block_sum(greater);
  equal = block_sum(equal);
  if (threadIdx.x == 0) mine[0] = greater, mine[1] = choice.known ? 0 : equal;
}

// Returns the begin of the range's entries in the list of all ranges; a range's first block stores it. The
// grid's first block adds to the status's counts. The whole block calls, once all stats are known.
__device__ std::uint32_t join(const SelectRanges& ranges, const RangeBlock& block) {
  const bool reports = blockIdx.x == 0;
  if (!reports && ranges.count == 1) return 0;
  std::uint32_t start = 0, total = 0, over = 0;
  float below = -magnitude_of(kLargestFinite + 1);  // minus the least threshold
  int broken = 0;
  for (std::uint32_t r = threadIdx.x; r < ranges.count; r += kThreads) {
    const SelectStats stats = *ranges.range[r].stats;
    if (r < block.range) start += stats.count;
    total += stats.count, over += stats.over;
    broken |= stats.finite == 0;
    if (stats.finite != 0 && -stats.threshold > below) below = -stats.threshold;
  }
  start = block_sum(start);
  if (block.index == 0 && threadIdx.x == 0) ranges.joined.starts[block.range] = start;
  if (!reports) return start;
  total = block_sum(total), over = block_sum(over);
  below = block_max(below);
  broken = __syncthreads_or(broken);
  if (threadIdx.x == 0) {
    const JoinedList& joined = ranges.joined;
    *joined.count = broken ? 0 : total;
    *joined.finite = broken ? 0 : 1;
    joined.status->selected += broken ? 0 : total;
    joined.status->over_capacity += over;
    joined.status->threshold = broken ? 0.0 : static_cast<double>(-below);
  }
  return start;
}

// An entry's place is the number of entries above the bound before it, and of needed ties before it.
__global__ void __launch_bounds__(kThreads) take_kernel(SelectRanges ranges, const float* u) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  const JoinedList joined = ranges.joined;
  const std::uint32_t start_of_range = joined.status ? join(ranges, block) : 0;
  const Choice choice = ranges.choices[block.range];
  if (choice.skip) return;
  const SelectRange& range = ranges.range[block.range];
  if (block.index == 0 && !choice.known) clear_digits(range.largest);
  const std::uint32_t* const blocks = range.largest.blocks;
  if (blocks[2 * block.index] == 0 && blocks[2 * block.index + 1] == 0) return;
  const Taken taken = range.taken;
  const MagnitudeKey bound = choice.known ? choice.bound : choice.kth;
  const std::uint32_t ties = choice.known ? 0 : choice.k - choice.greater;
  std::uint32_t greater = 0, equal = 0;  // before the entries at hand
  for (unsigned b = threadIdx.x; b < block.index; b += kThreads) {
    greater += blocks[2 * b];
    equal += blocks[2 * b + 1];
  }
  greater = block_sum(greater);
  equal = block_sum(equal);

  constexpr int per = 4;
  const Share share = share_of(choice, range, block, nullptr, u);
  for (std::size_t start = share.begin; start < share.end; start += per * kThreads) {
    const std::size_t first = start + per * threadIdx.x;
    MagnitudeKey keys[per];
    std::uint64_t mine = 0;  // above the bound, and at it in the upper half
#pragma unroll
    for (int j = 0; j < per; ++j) {
      keys[j] = first + j < share.end ? key_of(share.from.values[first + j]) : -1;
      if (keys[j] > bound) mine += 1;
      if (keys[j] == bound && ties > 0) mine += std::uint64_t{1} << 32;
    }
    if (!__syncthreads_or(mine != 0)) continue;
    std::uint64_t total;
    const std::uint64_t before = block_exclusive_sum(mine, total);
    std::uint32_t above = greater + static_cast<std::uint32_t>(before);
    std::uint32_t at = equal + static_cast<std::uint32_t>(before >> 32);
    if (mine != 0) {
#pragma unroll
      for (int j = 0; j < per; ++j) {
        const bool is_above = keys[j] > bound, is_tie = keys[j] == bound && at < ties;
        const std::uint32_t place = above + (at < ties ? at : ties);
        if ((is_above || is_tie) && place < taken.capacity) {
          const std::size_t i = first + j;
          const std::uint32_t index =
              share.from.indices ? share.from.indices[i] : static_cast<std::uint32_t>(i);
          taken.indices[place] = index;
          taken.values[place] = share.from.values[i];
          if (joined.indices && place < range.stats->count) {  // what is taken beyond, nobody counts
            joined.indices[start_of_range + place] = index + static_cast<std::uint32_t>(range.begin);
            joined.values[start_of_range + place] = share.from.values[i];
          }
        }
        above += is_above;
        at += is_tie;
      }
    }
    greater += static_cast<std::uint32_t>(total);
    equal += static_cast<std::uint32_t>(total >> 32);
  }
}

__global__ void __launch_bounds__(kThreads) join_kernel(SelectRanges ranges) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const JoinedList joined = ranges.joined;
  const std::uint32_t start = join(ranges, block), count = range.stats->count;
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; joined.indices && i < count;
       i += block.count * kThreads) {
    joined.indices[start + i] = range.taken.indices[i] + static_cast<std::uint32_t>(range.begin);
    joined.values[start + i] = range.taken.values[i];
  }
}

void count_digits(cudaStream_t stream, const SelectRanges& ranges, const Source* lists, const float* u,
                  const Choice* choices) {
  for (int d = 0; d < kDigits; ++d)
    launch(count_digit_kernel, ranges.shares.count, kThreads, stream, d, false, ranges, lists, u, choices);
}

struct AgainListing : Listing {
  __device__ MagnitudeKey bound(const SelectRanges& ranges, std::uint32_t) const {
    const Radix first = pick_digit(ranges.range->largest.digits, digit_width(0), ranges.choices->k, {0, 0});
    return (first.prefix << digit_shift(0)) - 1;
  }
};

}  // namespace

void list_again(cudaStream_t stream, const SelectRanges& ranges, float* u) {
  Accumulate read;
  read.u = u;
  launch(count_digit_kernel, ranges.shares.count, kThreads, stream, 0, true, ranges, nullptr, u,
         ranges.choices);
  launch(list_tiles_kernel<Fetch::read, Then::finish_again, AgainListing>, ranges.tiles.count, kThreads,
         stream, read, aligned(read), ranges, AgainListing());
}

void gather_tiles(cudaStream_t stream, const SelectRanges& ranges, const float* u) {
  launch(gather_kernel, grid_for(ranges.tiles.count, kWarps), kThreads, stream, u, ranges);
}

void accumulate_and_list(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate) {
  accumulate_and_list(stream, ranges, accumulate, Listing());
}

void find_kth(cudaStream_t stream, const SelectRanges& ranges, const Source* lists, const float* u,
              Choice* choices) {
  count_digits(stream, ranges, lists, u, choices);
  launch(finish_kth_kernel, ranges.count, kThreads, stream, ranges, choices);
}

void take_largest(cudaStream_t stream, const SelectRanges& ranges, const float* u) {
  count_digits(stream, ranges, nullptr, u, ranges.choices);
  launch(count_taken_kernel, ranges.shares.count, kThreads, stream, ranges, u);
  launch(take_kernel, ranges.shares.count, kThreads, stream, ranges, u);
}

void join_taken(cudaStream_t stream, const SelectRanges& ranges) {
  if (ranges.joined.status) launch(join_kernel, ranges.shares.count, kThreads, stream, ranges);
}

BlockTable::BlockTable(const std::vector<std::size_t>& counts) {
  std::vector<std::uint32_t> range, first{0};
  for (std::size_t r = 0; r < counts.size(); ++r) {
    range.insert(range.end(), counts[r], static_cast<std::uint32_t>(r));
    first.push_back(static_cast<std::uint32_t>(range.size()));
  }
  blocks_.count = first.back();
  if (counts.size() <= 1) return;
  range_ = on_device(range);
  first_ = on_device(first);
  blocks_.range = range_.data();
  blocks_.first = first_.data();
}

SelectMemory::SelectMemory(const std::vector<DeviceRange>& ranges, const std::vector<double>& densities,
                           const DeviceSelector& selector) {
  TOPKNOT_CHECK(densities.size() == ranges.size(), "a density per range");
  const auto parts = [](std::size_t n, std::size_t each) { return (n + each - 1) / each; };
  std::size_t elements = 0;
  for (const DeviceRange& range : ranges) elements += range.n;
  // The begin of each range's memory in the group's; then the whole.
  struct Place {
    std::size_t tiles = 0, slots = 0, entries = 0, taken = 0, largest = 0;
  } end;
  std::vector<Place> places;
  std::vector<SelectRange> table;
  std::vector<std::size_t> tiles, shares;
  for (std::size_t r = 0; r < ranges.size(); ++r) {
    const std::size_t n = ranges[r].n;
    const std::size_t most = std::clamp<std::size_t>(selector.list_limit(n, densities[r]), 1, n);
    tiles.push_back(parts(n, kSelectTile));
    // Blocks by the ranges' lengths: a group of many ranges has no more than the GPU keeps busy.
    shares.push_back(std::clamp<std::size_t>(parts(n, kLeastShare), 1,
                                             std::max<std::size_t>(1, kSelectBlocks * n / elements)));
    SelectRange range;
    range.begin = ranges[r].begin;
    range.n = n;
    range.position = ranges[r].position;
    range.least_density = ranges[r].least_density;
    range.taken.capacity = static_cast<std::uint32_t>(selector.capacity(n, densities[r]));
    range.slot = end.taken;
    range.list.limit = static_cast<std::uint32_t>(most);
    // A tile has as many slots as its share of the list; uneven lists read their full tiles again.
    range.tiles.slots = static_cast<std::uint32_t>(
        std::clamp<std::size_t>(std::bit_ceil(parts(most, tiles.back())), 32, 1024));
    table.push_back(range);
    places.push_back(end);
    end.tiles += tiles.back();
    end.slots += tiles.back() * range.tiles.slots;
    end.entries += most;
    end.taken += range.taken.capacity;
    end.largest += kDigitCounts + 2 * shares.back() + kRadixWords + 2;
  }
  counts_ = DeviceArray<std::uint32_t>(2 * end.tiles);
  slot_indices_ = DeviceArray<std::uint32_t>(end.slots);
  slot_values_ = DeviceArray<float>(end.slots);
  indices_ = DeviceArray<std::uint32_t>(end.entries);
  values_ = DeviceArray<float>(end.entries);
  taken_indices_ = DeviceArray<std::uint32_t>(end.taken);
  taken_values_ = DeviceArray<float>(end.taken);
  list_stats_ = DeviceArray<ListStats>(ranges.size());
  stats_ = DeviceArray<SelectStats>(ranges.size());
  largest_ = DeviceArray<std::uint32_t>(end.largest);
  TOPKNOT_CUDA(cudaMemsetAsync(largest_.data(), 0, largest_.bytes(), Context::current().stream()));
  for (std::size_t r = 0; r < ranges.size(); ++r) {
    SelectRange& range = table[r];
    const Place& at = places[r];
    range.tiles.counts = counts_.data() + at.tiles;
    range.tiles.offsets = counts_.data() + end.tiles + at.tiles;
    range.tiles.indices = slot_indices_.data() + at.slots;
    range.tiles.values = slot_values_.data() + at.slots;
    range.list.indices = indices_.data() + at.entries;
    range.list.values = values_.data() + at.entries;
    range.list.stats = list_stats_.data() + r;
    range.taken.indices = taken_indices_.data() + at.taken;
    range.taken.values = taken_values_.data() + at.taken;
    range.stats = stats_.data() + r;
    range.largest.digits = largest_.data() + at.largest;
    range.largest.blocks = range.largest.digits + kDigitCounts;
    range.largest.radix = range.largest.blocks + 2 * shares[r];
    range.tiles.calls = range.largest.radix + kRadixWords;
  }
  range_ = on_device(table);
  above_ = on_device(std::vector<MagnitudeKey>(ranges.size(), kLargestFinite));
  choices_ = DeviceArray<Choice>(ranges.size());
  tiles_ = BlockTable(tiles);
  shares_ = BlockTable(shares);
  ranges_.range = range_.data();
  ranges_.count = static_cast<std::uint32_t>(ranges.size());
  ranges_.tiles = tiles_.blocks();
  ranges_.shares = shares_.blocks();
  ranges_.above = above_.data();
  ranges_.choices = choices_.data();
}

}  // namespace topknot::cuda
