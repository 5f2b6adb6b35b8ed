#pragma once
// CUDA counterpart of compress/select/selector.h: works on a stream; the host does not know how many entries were
// selected. One per group and rank, for all of the group's selection ranges. The arithmetic is the CPU's, so what is
// selected is the same, entry by entry.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "compress/memory/accumulate.h"
#include "nn/core/cuda/step_parameters.h"

namespace topknot::cuda {

// A range's selection, in GPU memory: positions relative to the range, strictly ascending.
struct DeviceSelected {
  std::uint32_t* indices = nullptr;  // room for `capacity`
  float* values = nullptr;
  std::uint32_t capacity = 0;  // DeviceSelector::capacity(), of the greatest density of the run
  // In GPU memory, written by select():
  struct Stats {
    std::uint32_t count = 0;   // entries written; at most capacity
    std::uint32_t finite = 1;  // 0: a NaN or Inf was in the range; count is 0 then
    std::uint32_t over = 0;    // selected beyond the capacity: the least of them, kept back
    float threshold = 0;       // as Selected::threshold
  };
  Stats* stats = nullptr;
};

// A selection range of a group.
struct DeviceRange {
  std::size_t begin = 0, n = 0;  // in the group's vectors
  std::size_t position = 0;      // of its first element in the arena
  double least_density = 0;      // its own, which counts where it exceeds the step's
};

class DeviceSelector {
 public:
  virtual ~DeviceSelector() = default;

  // The most entries that select() may write of a range of n elements at this density: k, or compress.capacity times k,
  // or (capacity none) what the method may select at most, which is the whole range for threshold methods.
  virtual std::size_t capacity(std::size_t n, double density) const = 0;
  // For steps of these densities or less, one per range; `selected`: where their selections go, side by side in the
  // order of the ranges. Sizes scratch memory; changes what a graph has captured.
  virtual void set_density(std::span<const double> densities, std::span<const DeviceSelected> selected) = 0;
  // Makes u by `accumulate` (of the group), in the same pass as the method's first, and selects from it. k and
  // the like follow from parameters->density on the GPU.
  virtual void select(cudaStream_t stream, const Accumulate& accumulate,
                      const StepParameters* parameters) = 0;
  // After all ranks' blocks are decoded: where the status is good, keeps what select() learnt and what the
  // average made of it, else forgets. `sent`: the selected values as the other ranks decoded them, where the selected
  // ones are; `average`: of the group, not written yet where the status is bad. `weight`: of this rank in the average, a
  // float in GPU memory, to be divided by the ranks.
  virtual void commit(cudaStream_t stream, const StepStatus* status, const float* sent, const float* average,
                      const float* weight, int ranks) = 0;
  // The same bytes as the CPU's selectors save, range after range; waits for the GPU.
  virtual void save(StateWriter& writer) const { static_cast<void>(writer); }
  virtual void load(StateReader& reader) { static_cast<void>(reader); }
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

}  // namespace topknot::cuda
