// CUDA counterpart of cyclic: the same entries, selected without the host.
#include "compress/select/cuda/device_selector.h"
#include "compress/select/selector.h"

namespace topknot::cuda {

// In cyclic.cu.
void cyclic_take(cudaStream_t stream, const SelectRanges& ranges, const StepParameters* step,
                 std::size_t phase, const float* u);

namespace {

// For all selection ranges of a group: each launch serves all of them.
class DeviceCyclic final : public DeviceSelector {
 public:
  DeviceCyclic(const CompressOptions& options, const std::vector<DeviceRange>&) {
    // The key that cyclic.cpp declares.
    phase_ = static_cast<std::size_t>(options.get<int>(selectors().options("cyclic").front()));
  }

  std::size_t capacity(std::size_t n, double density) const override { return target_count(density, n); }
  // The pass that makes u lists nothing of a finite vector; it finds a NaN or an infinity.
  std::size_t list_limit(std::size_t, double) const override { return 1; }

  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* step) override {
    accumulate_and_list(stream, ranges, accumulate);
    cyclic_take(stream, ranges, step, phase_, accumulate.u);
  }

 private:
  std::size_t phase_;
};

const bool cyclic_registered = (add_device_selector<DeviceCyclic>("cyclic"), true);

}  // namespace
}  // namespace topknot::cuda
