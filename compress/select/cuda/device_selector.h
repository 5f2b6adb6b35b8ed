#pragma once
// CUDA counterpart of compress/select/selector.h: works on a stream; the host does not know how many entries were
// selected. One per group and rank, for all of the group's selection ranges. The arithmetic is the CPU's, so what is
// selected is the same, entry by entry.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "compress/compressor.h"
#include "compress/memory/accumulate.h"
#include "compress/select/cuda/gpu_select.h"
#include "nn/core/cuda/context.h"
#include "nn/core/step.h"

namespace topknot::cuda {

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

  // The most entries that select() may take of a range of n elements at this density: k, or compress.capacity times k,
  // or (capacity none) what the method may select at most, which is the whole range for threshold methods.
  virtual std::size_t capacity(std::size_t n, double density) const = 0;
  // How many entries the list of such a range holds.
  virtual std::size_t list_limit(std::size_t n, double density) const = 0;
  // For steps of these densities or less, one per range; changes what a graph has captured.
  virtual void set_density(const std::vector<double>& densities) { static_cast<void>(densities); }
  // Makes u by `accumulate` (of the group), in the same pass as the method's first, and selects from it. k and
  // the like follow from parameters->density on the GPU. `ranges`: with memory for this density.
  virtual void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
                      const StepParameters* parameters) = 0;
  // Where the status is good, keeps what select() learnt and what the average made of it, else forgets.
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
void add_device_selector(const std::string& name) {
  device_selectors().add(
      name, "", [](const CompressOptions& options, const std::vector<DeviceRange>& ranges) {
        return std::unique_ptr<DeviceSelector>(std::make_unique<Implementation>(options, ranges));
      });
}

// Null where the selection has no CUDA counterpart.
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

// A group's ranges, with memory for what a selector takes of them in steps of these densities or less, one per range.
class SelectMemory {
 public:
  SelectMemory() = default;
  SelectMemory(const std::vector<DeviceRange>& ranges, const std::vector<double>& densities,
               const DeviceSelector& selector);
  const SelectRanges& ranges() const { return ranges_; }
  // Of all ranges, side by side in their order.
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

// The capacity of methods that bound nothing themselves: compress.capacity (`multiple`, 0: none) times k, or
// everything.
inline std::size_t capacity_within(double multiple, std::size_t k, std::size_t n) {
  const double most = multiple * static_cast<double>(k);
  return multiple == 0 || most >= static_cast<double>(n) ? n : static_cast<std::size_t>(most);
}

}  // namespace topknot::cuda
