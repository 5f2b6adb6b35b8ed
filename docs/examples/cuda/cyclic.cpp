// CUDA counterpart of cyclic: the same entries, selected without the host.
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "compress/select/selector.h"

namespace topknot::cuda {

// In cyclic.cu.
void cyclic_take(cudaStream_t stream, const SelectRanges& ranges, const StepParameters* step,
                 std::size_t phase, const float* u);

namespace {

// For all selection ranges of a group: each launch serves all of them.
class DeviceCyclic final : public DeviceSelector {
 public:
  DeviceCyclic(const CompressOptions& options, const std::vector<DeviceRange>& ranges) : ranges_(ranges) {
    // The key that cyclic.cpp declares.
    phase_ = static_cast<std::size_t>(options.get<int>(selectors().options("cyclic").front()));
  }

  std::size_t capacity(std::size_t n, double density) const override { return target_count(density, n); }
  void set_density(std::span<const double> densities, std::span<const DeviceSelected> selected) override {
    memory_ = SelectMemory(ranges_, densities, selected, [](std::size_t, double) { return std::size_t{1}; });
  }

  // The pass that makes u lists nothing of a finite vector; it finds a NaN or an infinity.
  void select(cudaStream_t stream, const Accumulate& accumulate, const StepParameters* step) override {
    accumulate_and_list(stream, memory_.ranges(), accumulate);
    cyclic_take(stream, memory_.ranges(), step, phase_, accumulate.u);
  }
  void commit(cudaStream_t, const StepStatus*, const float*, const float*, const float*, int) override {}

 private:
  std::vector<DeviceRange> ranges_;
  std::size_t phase_;
  SelectMemory memory_;
};

const bool cyclic_registered = (add_device_selector<DeviceCyclic>("cyclic"), true);

}  // namespace
}  // namespace topknot::cuda
