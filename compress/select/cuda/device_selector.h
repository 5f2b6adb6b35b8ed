#pragma once
// CUDA counterpart of compress/select/selector.h: works on a stream; the host does not know how many entries
// were selected. One per group and rank, for all of the group's selection ranges. The arithmetic is the
// CPU's, so what is selected is the same, entry by entry.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "compress/compressor.h"
#include "compress/memory/accumulate.h"
#include "compress/select/passes/keys.h"
#include "nn/core/cuda/context.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// The primitives of selection on a GPU: listing the elements above a bound, and taking the k largest of a
// list or of a vector. Everything that is known only during a step (bounds, counts, k, which branch to take)
// lives in GPU memory; grids follow capacities, and kernels that a step does not need return at once. Every
// run gives the same bits: no float atomics, lists ascend by index, ties go to the lower index. One launch
// serves all ranges of a group, so a step has as many launches if each tensor selects for itself as if the
// group does. SelectMemory owns the memory.
//
//   accumulate_and_list(...)   u = gradient + residual, and what exceeds a bound, in one pass (12 bytes per element);
//                              at its end the method looks at the lists' stats and writes Choices, here or in
//                              kernels of its own
//                              (of one range also accumulate_and_list<Then::finish>() and finish_topk() of
//                              gpu_tiles.h: fewer launches, and one block that takes the k largest)
//   take_largest(...)          the k largest, or all above a bound, of the list or of u; and the ranges' joined list
//
// Vectors have fewer than 2^32 elements.

inline constexpr std::size_t kSelectTile = 4096;  // elements that a block lists
inline constexpr std::size_t kLeastShare = 2048;  // of a list or a vector, for a block that reads it
inline constexpr std::size_t kSelectBlocks =
    1024;  // at most, and one per range, of kernels that read lists or vectors

// A pass's results, in GPU memory.
struct ListStats {
  std::uint32_t count = 0;   // entries above the bound, also if more than the list's limit
  std::uint32_t finite = 1;  // 0: a NaN or Inf was among the elements
};

// Entries above a bound, in GPU memory, ascending by index; none if stats->count exceeds the limit.
struct EntryList {
  std::uint32_t* indices = nullptr;  // room for `limit`
  float* values = nullptr;
  std::uint32_t limit = 0;
  ListStats* stats = nullptr;
};

// Scratch of a pass that lists: a count and an offset a tile, and `slots` entries per tile. A tile that holds
// more is read again, or, for finish_topk(), is in the list.
struct TileMemory {
  std::uint32_t* counts = nullptr;
  std::uint32_t* offsets = nullptr;
  std::uint32_t* indices = nullptr;
  float* values = nullptr;
  std::uint32_t slots = 0;
  std::uint32_t* calls = nullptr;  // of is_last_block(); then how many entries tiles have put into a list
};

// A decision on what to take, in GPU memory; the method's kernels write the first part.
struct Choice {
  std::uint32_t skip = 0;   // 1: nothing is taken, the sources are not read
  std::uint32_t whole = 0;  // 1: from the vector, 0: from the list
  std::uint32_t known = 0;  // 1: all with key > `bound`; 0: the k largest
  std::uint32_t k = 0;      // 1 to the source's count
  MagnitudeKey bound = 0;
  double of_kth = 1;  // the threshold is this times the k-th magnitude; 0: the method's own, and left alone
  // Found, if not skipped and not known:
  MagnitudeKey kth = 0;       // the k-th largest key
  std::uint32_t greater = 0;  // how many keys exceed it
};

// Scratch of take_largest() and find_kth(). `digits` is zero before and after.
struct LargestMemory {
  std::uint32_t* digits = nullptr;  // kDigitCounts
  std::uint32_t* blocks = nullptr;  // two per block that serves the range
  std::uint32_t* radix = nullptr;   // kRadixWords
};
inline constexpr std::size_t kDigitCounts = 2048 + 1024 + 1024;
inline constexpr std::size_t kRadixWords = 8;

// The taken entries, Choice::k or all above the bound, ascending by index, `capacity` at most.
struct Taken {
  std::uint32_t* indices = nullptr;  // in the range
  float* values = nullptr;
  std::uint32_t capacity = 0;
};

// A selection's results, in GPU memory.
struct SelectStats {
  std::uint32_t count = 0;   // entries taken; at most the capacity
  std::uint32_t finite = 1;  // 0: a NaN or Inf was in the range; count is 0 then
  std::uint32_t over = 0;    // selected beyond the capacity: the least of them, kept back
  float threshold = 0;       // as Selection::threshold; take_largest() writes it as Choice::of_kth says
};

// A range of a group that selects for itself, in GPU memory.
struct SelectRange {
  std::size_t begin = 0, n = 0;  // in the group's vectors
  std::uint64_t position = 0;    // of its first element in the arena
  double least_density = 0;      // counts if it exceeds the step's
  TileMemory tiles;
  EntryList list;
  LargestMemory largest;
  Taken taken;
  std::size_t slot = 0;  // where `taken` begins in the group's
  SelectStats* stats = nullptr;

  TOPKNOT_HOST_DEVICE double density(const StepParameters& step) const {
    return step.density < least_density ? least_density : step.density;
  }
};

// Which range each block of a grid serves.
struct RangeBlocks {
  const std::uint32_t* range = nullptr;  // by block; null: there is one range
  const std::uint32_t* first = nullptr;  // by range: its first block; then the number of all
  std::uint32_t count = 0;               // of blocks
};

// The joined selections of all ranges, in GPU memory; null if nobody asks.
struct JoinedList {
  std::uint32_t* starts = nullptr;  // by range: where its entries begin
  std::uint32_t* count = nullptr;   // of all: 0 if a range is not finite
  std::uint32_t* finite = nullptr;
  // The list: positions in the group. Null where there is one range, whose selection is the list.
  std::uint32_t* indices = nullptr;
  float* values = nullptr;
  StepStatus* status = nullptr;  // what it says of selections is added
  // For finish_topk(), if not null: the message of a plain codec, of numel elements.
  std::byte* message = nullptr;
  std::uint64_t message_bytes = 0;
  std::uint32_t numel = 0;
};

// The ranges of a group, and what a step decides of each.
struct SelectRanges {
  const SelectRange* range = nullptr;
  std::uint32_t count = 0;
  RangeBlocks tiles;              // kSelectTile elements each
  RangeBlocks shares;             // of lists and vectors
  MagnitudeKey* above = nullptr;  // by range: the bound of its list
  Choice* choices = nullptr;      // by range: what is taken
  JoinedList joined;
};

// Makes u[i] = accumulate(i) and lists those with key > ranges.above, as Listing of gpu_tiles.h.
void accumulate_and_list(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate);

// A list or vector from which entries are taken.
struct Source {
  const float* values = nullptr;           // their magnitudes are compared
  const std::uint32_t* indices = nullptr;  // ascending; null: the positions in `values`
  const std::uint32_t* count = nullptr;    // how many there are, in GPU memory; null: `size`
  std::size_t size = 0;                    // at most
};

// Finds kth and greater of each choice that is not `known`: radix selection, 11, 10 and 10 bits of 31, 4
// bytes an element each. From the group's u if the choice is `whole`, else from `lists`, one per range.
void find_kth(cudaStream_t stream, const SelectRanges& ranges, const Source* lists, const float* u,
              Choice* choices);

// find_kth() of ranges.choices, from the ranges' lists or u, and two passes more that take: 20 bytes per
// element of the source, 8 if the bound is known.
void take_largest(cudaStream_t stream, const SelectRanges& ranges, const float* u);

// Makes the ranges' joined list of what they have taken: last, by a method that does not call take_largest().
void join_taken(cudaStream_t stream, const SelectRanges& ranges);

// The choice that compress.capacity makes of `count` selected entries, where k were asked for: all of them,
// above `bound`, or the floor(capacity * k) largest; `over`: how many are kept back. Capacity 0: none.
TOPKNOT_HOST_DEVICE void choose_within(double capacity, std::uint32_t k, std::uint32_t count,
                                       MagnitudeKey bound, Choice& choice, std::uint32_t& kept,
                                       std::uint32_t& over) {
  const double most = capacity * static_cast<double>(k);
  const bool cut = capacity != 0 && static_cast<double>(count) > most;
  kept = cut ? static_cast<std::uint32_t>(most) : count;
  over = count - kept;
  choice.skip = kept == 0;
  choice.known = !cut;
  choice.k = kept;
  choice.bound = bound;
  choice.of_kth = 0;
}

// The outcome of a selection, in GPU memory, once all ranks' blocks are decoded.
struct DeviceOutcome {
  const float* sent =
      nullptr;  // the selected values as the other ranks decoded them, where the selected ones are
  const float* average = nullptr;  // of the group; not written yet where the status is bad
  const float* weight = nullptr;   // of this rank in the average, to be divided by the ranks
  int ranks = 1;
};

// A selection range of a group.
struct DeviceRange {
  std::size_t begin = 0, n = 0;  // in the group's vectors
  std::size_t position = 0;      // of its first element in the arena
  double least_density = 0;      // its own, which counts where it exceeds the step's
};

// How a method came to a range's entries in the last select(), as far as it tells; for tests.
struct DeviceDiagnostics {
  CarriedBound carried = {};          // topk: as committed
  ListState list = ListState::good;   // topk: what became of the list
  int level = 0;                      // gaussiank: where the last committed step ended
  std::vector<double> thresholds;     // gaussiank: by level
  std::vector<std::uint32_t> counts;  // gaussiank: by level, how many exceed the threshold
  // gaussiank: by chunk of the group, the sums of x - shift and of its square.
  std::vector<std::pair<double, double>> moments;
};

class DeviceSelector {
 public:
  virtual ~DeviceSelector() = default;

  // The most entries that select() may take of a range of n elements at this density: k, or compress.capacity
  // times k, or (capacity none) the method's most, for threshold methods the whole range. This one: k.
  virtual std::size_t capacity(std::size_t n, double density) const { return target_count(density, n); }
  // How many entries the list of such a range holds. This one: as many as are worth it for k.
  virtual std::size_t list_limit(std::size_t n, double density) const {
    return topknot::list_limit(target_count(density, n));
  }
  // For steps of these densities or less, one per range; changes what a graph has captured.
  virtual void set_density(const std::vector<double>& densities) { static_cast<void>(densities); }
  // Makes u by `accumulate` (of the group), in the same pass as the method's first, and selects from it. k
  // and the like follow from parameters->density on the GPU. `ranges`: with memory for this density. Ends with
  // take_largest() or join_taken().
  virtual void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
                      const StepParameters* parameters) = 0;
  // Whether the last select() has written ranges.joined.message, if that was not null.
  virtual bool writes_message() const { return false; }
  // If the status is good, keeps what select() learnt and what the average made of it, else forgets.
  virtual void commit(cudaStream_t, const SelectRanges&, const StepStatus*, const DeviceOutcome&) {}
  // The same bytes as the CPU's selectors save, range after range; waits for the GPU.
  virtual void save(StateWriter& writer) const { static_cast<void>(writer); }
  virtual void load(StateReader& reader) { static_cast<void>(reader); }
  // Waits for the GPU.
  virtual DeviceDiagnostics diagnostics(std::size_t range) const {
    return static_cast<void>(range), DeviceDiagnostics();
  }
};

using DeviceSelectorFactory = std::unique_ptr<DeviceSelector> (*)(const CompressOptions& options,
                                                                  const std::vector<DeviceRange>& ranges);
// CUDA counterparts, by the name of the selection (compress.select).
Registry<DeviceSelectorFactory>& device_selectors();
template <class Implementation>  // made from (options, ranges)
bool add_device_selector(const std::string& name) {
  return device_selectors().add(name, "", make_as<DeviceSelector, Implementation>);
}

// Null if the selection has no CUDA counterpart.
std::unique_ptr<DeviceSelector> make_device_selector(const std::string& select,
                                                     const CompressOptions& options,
                                                     const std::vector<DeviceRange>& ranges);

// Which range each block of a grid serves, where range r has counts[r] blocks.
class BlockTable {
 public:
  BlockTable() = default;
  explicit BlockTable(const std::vector<std::size_t>& counts);
  const RangeBlocks& blocks() const { return blocks_; }

 private:
  DeviceArray<std::uint32_t> range_, first_;
  RangeBlocks blocks_;
};

// A group's ranges, with memory for what a selector takes of them at these densities or less, one per range.
class SelectMemory {
 public:
  SelectMemory() = default;
  SelectMemory(const std::vector<DeviceRange>& ranges, const std::vector<double>& densities,
               const DeviceSelector& selector);
  const SelectRanges& ranges() const { return ranges_; }
  // The capacity of all ranges together, which lie next to each other in order.
  std::size_t capacity() const { return taken_values_.size(); }
  std::uint32_t* taken_indices() const { return taken_indices_.data(); }
  float* taken_values() const { return taken_values_.data(); }

 private:
  DeviceArray<std::uint32_t> counts_, slot_indices_, indices_, taken_indices_, largest_;
  DeviceArray<float> slot_values_, values_, taken_values_;
  DeviceArray<ListStats> list_stats_;
  DeviceArray<SelectStats> stats_;
  DeviceArray<SelectRange> range_;
  DeviceArray<MagnitudeKey> above_;
  DeviceArray<Choice> choices_;
  BlockTable tiles_, shares_;
  SelectRanges ranges_;
};

// The capacity of methods without a bound: compress.capacity (`multiple`, 0: none) times k, or everything.
inline std::size_t capacity_within(double multiple, std::size_t k, std::size_t n) {
  const double most = multiple * static_cast<double>(k);
  return multiple == 0 || most >= static_cast<double>(n) ? n : static_cast<std::size_t>(most);
}

}  // namespace topknot::cuda
