// The end of topk for a single range: one block takes the k largest of its tiles' lists and writes a message.
#include <topknot_kernel.h>

#include "compress/codec/cuda/device_codec.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kFinishThreads = 1024, kFinishWarps = kFinishThreads / 32;

struct Entries {
  TileMemory tiles;
  EntryList list;          // of tiles with more entries than slots
  const float* u;          // not null: its elements are the entries, the tiles' lists are not complete
  std::uint32_t of_tiles;  // how many tiles there are
  std::uint32_t count;     // of entries

  // Calls work(key, value, index()) for each entry in order, a warp's consecutive; idle lanes with key -1.
  __device__ void each(const auto& work) const {
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const std::uint32_t per = (count / kFinishWarps + 32) / 32 * 32;
    const std::uint32_t begin = warp * per < count ? warp * per : count;
    const std::uint32_t end = begin + per < count ? begin + per : count;
    std::uint32_t tile = u ? 0 : lower_bound(tiles.offsets, of_tiles, begin + lane + 1) - 1;
    for (std::uint32_t at = begin + lane; at - lane < end; at += 32) {
      const bool there = at < end;
      const float* values = u;
      const std::uint32_t* indices = nullptr;
      std::uint32_t i = at;
      if (!u && there) {
        while (tile + 1 < of_tiles && tiles.offsets[tile + 1] <= at) ++tile;
        const bool more = (tiles.counts[tile] & ~kBroken) > tiles.slots;
        const std::uint32_t slot = tile * tiles.slots;
        values = more ? list.values : tiles.values, indices = more ? list.indices : tiles.indices;
        i = (more ? tiles.indices[slot] : slot) + (at - tiles.offsets[tile]);
      }
      const float value = there ? values[i] : 0.0f;
      work(there ? key_of(value) : -1, value, [&] { return indices ? indices[i] : i; });
    }
  }
};

// The k largest of the list, or of u.
__device__ void take(const SelectRange& range, const float* u, Choice& choice, std::uint32_t* message) {
  __shared__ std::uint32_t counts[2048];
  const std::uint32_t listed = range.list.stats->count, k = choice.k;
  const bool complete = listed <= range.list.limit;
  const Entries entries{range.tiles, range.list, complete ? nullptr : u,
                        static_cast<std::uint32_t>((range.n + kSelectTile - 1) / kSelectTile),
                        complete ? listed : static_cast<std::uint32_t>(range.n)};
  Radix radix{0, 0};
  for (int left = 31; left > 0;) {
    const int bits = left == 31 ? 11 : 10;
    left -= bits;
    for (int i = static_cast<int>(threadIdx.x); i < 1 << bits; i += kFinishThreads) counts[i] = 0;
    __syncthreads();
    entries.each([&](MagnitudeKey key, float, const auto&) {
      if (key >= 0 && key >> left >> bits == radix.prefix)
        atomicAdd(&counts[(key >> left) & ((1 << bits) - 1)], 1u);
    });
    __syncthreads();
    radix = pick_digit<kFinishThreads>(counts, bits, k, radix);
  }
  const MagnitudeKey kth = radix.prefix;

  // An entry's place is the number of entries above the k-th before it, and of ties as far as they are needed.
  std::uint32_t greater = 0, equal = 0;
  entries.each([&](MagnitudeKey key, float, const auto&) {
    greater += key > kth;
    equal += key == kth;
  });
  std::uint64_t total;
  std::uint64_t before = block_exclusive_sum<kFinishThreads>(greater | std::uint64_t{equal} << 32, total);
  before = __shfl_sync(kAllLanes, before, 0);
  greater = static_cast<std::uint32_t>(before);
  equal = static_cast<std::uint32_t>(before >> 32);
  const std::uint32_t ties = k - radix.higher, earlier = (1u << (threadIdx.x & 31)) - 1;
  entries.each([&](MagnitudeKey key, float value, const auto& index) {
    const unsigned above = __ballot_sync(kAllLanes, key > kth), at = __ballot_sync(kAllLanes, key == kth);
    const std::uint32_t tie = equal + static_cast<std::uint32_t>(__popc(at & earlier));
    const std::uint32_t place =
        greater + static_cast<std::uint32_t>(__popc(above & earlier)) + (tie < ties ? tie : ties);
    if (key > kth || (key == kth && tie < ties)) {
      const std::uint32_t position = index();
      range.taken.indices[place] = position;
      range.taken.values[place] = value;
      if (message) message[place] = position, message[k + place] = bits_of(value);
    }
    greater += static_cast<std::uint32_t>(__popc(above));
    equal += static_cast<std::uint32_t>(__popc(at));
  });
  if (threadIdx.x != 0) return;
  choice.kth = kth;
  choice.greater = radix.higher;
  range.stats->threshold = static_cast<float>(choice.of_kth * static_cast<double>(magnitude_of(kth)));
}

__global__ void __launch_bounds__(kFinishThreads, 1) finish_topk_kernel(SelectRanges ranges, const float* u) {
  await_previous();
  const SelectRange& range = *ranges.range;
  const JoinedList& joined = ranges.joined;
  auto* const message =
      joined.message ? reinterpret_cast<std::uint32_t*>(joined.message + kHeaderBytes) : nullptr;
  if (!ranges.choices->skip) take(range, u + range.begin, *ranges.choices, message);
  for (std::size_t i = threadIdx.x; i < kDigitCounts; i += kFinishThreads) range.largest.digits[i] = 0;
  const std::size_t words = 2 * std::size_t{range.stats->count} + threadIdx.x;
  for (std::size_t i = words; message && i < (joined.message_bytes - kHeaderBytes) / 4; i += kFinishThreads)
    message[i] = 0;
  if (threadIdx.x != 0) return;
  const SelectStats stats = *range.stats;
  BlockWork plain;
  plain.numel = joined.numel;
  if (message)
    store_header(plain, {nullptr, nullptr, &range.stats->count, &range.stats->finite}, joined.message);
  if (!joined.status) return;
  *joined.starts = 0;
  *joined.count = stats.count;
  *joined.finite = stats.finite;
  joined.status->selected += stats.count;
  joined.status->threshold = static_cast<double>(stats.threshold);
}

}  // namespace

void finish_topk(cudaStream_t stream, const SelectRanges& ranges, float* u) {
  list_again(stream, ranges, u);
  launch(finish_topk_kernel, 1u, kFinishThreads, stream, ranges, u);
}

}  // namespace topknot::cuda
