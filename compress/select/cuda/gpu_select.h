#pragma once
// What selections on a GPU are made of: lists of what exceeds a bound, and the k largest of a list or of a vector.
// Everything that is known only during a step (bounds, counts, k, which way to go) lives in GPU memory; grids follow
// capacities, and kernels that a step does not need return at once. The same bits in every run: no float atomics,
// lists ascend by index, ties go to the lower index. C++17; compress/select/cuda/gpu_select_memory.h owns the memory.
//
//   accumulate_and_list(...)   u = gradient + residual, and what exceeds a bound, in one pass (12 bytes per element)
//   (a kernel of the method's) looks at the list's stats and writes a Choice
//   take_largest(...)          the k largest, or all above a bound, of the list or of u
//
// Vectors have fewer than 2^32 elements.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/density_count.h"
#include "compress/memory/accumulate.h"
#include "compress/select/passes/carried_bound.h"

namespace topknot::cuda {

using GpuKey = Key<float>;
inline constexpr GpuKey kLargestFinite = KeyOf<float>::largest_finite;

inline constexpr std::size_t kSelectTile = 4096;    // elements that a block lists
inline constexpr std::size_t kSelectBlocks = 1024;  // at most, of kernels that read a list or a vector

// What a pass found, in GPU memory.
struct ListStats {
  std::uint32_t count = 0;   // entries above the bound, also where more than the list's limit
  std::uint32_t finite = 1;  // 0: a NaN or Inf was among the elements
};

// Entries above a bound, in GPU memory, ascending by index. Where stats->count exceeds the limit nothing is listed.
struct EntryList {
  std::uint32_t* indices = nullptr;  // room for `limit`
  float* values = nullptr;
  std::uint32_t limit = 0;
  ListStats* stats = nullptr;
};

// Scratch of a pass that lists: a count and an offset a tile, and `slots` entries per tile. A tile that holds more
// is read again.
struct TileMemory {
  std::uint32_t* counts = nullptr;
  std::uint32_t* offsets = nullptr;
  std::uint32_t* indices = nullptr;
  float* values = nullptr;
  std::uint32_t slots = 0;
};

// Makes u[i] = accumulate(i) for i < n and lists those with key > *above. `above`: in GPU memory, at most
// kLargestFinite, so that NaN and Inf are always found; kLargestFinite lists nothing of a finite vector.
void accumulate_and_list(cudaStream_t stream, const Accumulate& accumulate, std::size_t n,
                         const GpuKey* above, const TileMemory& tiles, const EntryList& list);
// The same of a vector that is there already: 4 bytes per element.
void list_above(cudaStream_t stream, const float* u, std::size_t n, const GpuKey* above,
                const TileMemory& tiles, const EntryList& list);

// Where entries are taken from.
struct Source {
  const float* scores = nullptr;           // their magnitudes are compared
  const float* values = nullptr;           // taken
  const std::uint32_t* indices = nullptr;  // taken, ascending; null: the positions in `scores`
  const std::uint32_t* count = nullptr;    // how many there are, in GPU memory; null: `size`
  std::size_t size = 0;                    // at most
};
inline Source source_of(const EntryList& list) {
  return {list.values, list.values, list.indices, &list.stats->count, list.limit};
}
inline Source source_of(const float* u, std::size_t n) {
  return {u, u, nullptr, nullptr, n};
}

// What is to be taken, in GPU memory; the caller's kernels write the first part.
struct Choice {
  std::uint32_t skip = 0;   // 1: nothing is taken, the sources are not read
  std::uint32_t whole = 0;  // 1: from the second source (the vector), 0: from the first (a list)
  std::uint32_t known = 0;  // 1: all with key > `bound`; 0: the k largest
  std::uint32_t k = 0;      // 1 to the source's count
  GpuKey bound = 0;
  std::uint32_t own_threshold = 0;  // 1: Taken::threshold is the method's, and left alone
  // Found, where not skipped and not known:
  GpuKey kth = 0;             // the k-th largest key
  std::uint32_t greater = 0;  // how many keys exceed it
};

// Scratch of take_largest() and find_kth(). `digits` is zero before and after.
struct LargestMemory {
  std::uint32_t* digits = nullptr;  // kDigitCounts
  std::uint32_t* blocks = nullptr;  // 2 * kSelectBlocks
  std::uint32_t* radix = nullptr;   // kRadixWords
};
inline constexpr std::size_t kDigitCounts = 2048 + 1024 + 1024;
inline constexpr std::size_t kRadixWords = 8;

// Finds choice->kth and choice->greater, for choice->known 0: radix selection, 11, 10 and 10 bits of the 31, 4 bytes
// an element each.
void find_kth(cudaStream_t stream, const Source& list, const Source& whole, const LargestMemory& memory,
              Choice* choice);

// What was taken, ascending by index; nothing beyond `capacity` is written. Their number is not counted: it is
// choice->k, or how many exceed the bound.
struct Taken {
  std::uint32_t* indices = nullptr;
  float* values = nullptr;
  std::uint32_t capacity = 0;
  float* threshold = nullptr;  // the k-th magnitude goes there, where k are taken; or null
};
// find_kth(), and two passes more that take: 20 bytes per element of the source, 8 where the bound is known.
void take_largest(cudaStream_t stream, const Source& list, const Source& whole, const LargestMemory& memory,
                  Choice* choice, const Taken& taken);

// The choice that compress.capacity makes of `count` selected entries, where k were asked for: all of them, above
// `bound`, or the floor(capacity * k) largest; the threshold stays the method's. `over`: how many are kept back. A
// capacity of 0 means none.
TOPKNOT_HOST_DEVICE void choose_within(double capacity, std::uint32_t k, std::uint32_t count, GpuKey bound,
                                       Choice& choice, std::uint32_t& kept, std::uint32_t& over) {
  const double most = capacity * static_cast<double>(k);
  const bool cut = capacity != 0 && static_cast<double>(count) > most;
  kept = cut ? static_cast<std::uint32_t>(most) : count;
  over = count - kept;
  choice.skip = kept == 0;
  choice.known = !cut;
  choice.k = kept;
  choice.bound = bound;
  choice.own_threshold = 1;
}

// Where select() writes what it found: DeviceSelected::Stats.
struct StatsOut {
  std::uint32_t* count;
  std::uint32_t* finite;
  std::uint32_t* over;
  float* threshold;
};

}  // namespace topknot::cuda
