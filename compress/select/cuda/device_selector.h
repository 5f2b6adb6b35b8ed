#pragma once
// CUDA counterpart of compress/select/selector.h: works on a stream; the host does not know how many entries were
// selected. One per group and rank, for all of the group's selection ranges. The arithmetic is the CPU's, so what is
// selected is the same, entry by entry.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "compress/memory/accumulate.h"
#include "compress/select/cuda/gpu_select.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// A selection range of a group.
struct DeviceRange {
  std::size_t begin = 0, n = 0;  // in the group's vectors
  std::size_t position = 0;      // of its first element in the arena
  double least_density = 0;      // its own, which counts where it exceeds the step's
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
