// CUDA counterpart of cyclic: the same entries, selected without the host.
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "compress/select/selector.h"

namespace topknot::cuda {

// In cyclic.cu.
void cyclic_reset(cudaStream_t stream, GpuKey* above);
void cyclic_take(cudaStream_t stream, const StepParameters* step, std::size_t n, std::size_t phase,
                 const float* u, const ListStats* found, const Taken& taken, const StatsOut& stats);

namespace {

class DeviceCyclic final : public DeviceSelector {
 public:
  DeviceCyclic(const CompressOptions& options, std::size_t n, std::size_t) : n_(n), above_(1), list_(n, 1) {
    // The key that cyclic.cpp declares.
    phase_ = static_cast<std::size_t>(options.get<int>(selectors().options("cyclic").front()));
    cyclic_reset(Context::current().stream(), above_.data());
  }

  std::size_t capacity(double density) const override { return target_count(density, n_); }
  void set_density(double) override {}

  // The pass that makes u lists nothing of a finite vector; it finds a NaN or an infinity.
  void select(cudaStream_t stream, const Accumulate& accumulate, const StepParameters* step,
              const DeviceSelected& selected) override {
    accumulate_and_list(stream, accumulate, n_, above_.data(), list_.tiles(), list_.list());
    cyclic_take(stream, step, n_, phase_, accumulate.u, list_.list().stats, taken_of(selected),
                stats_of(selected));
  }
  void commit(cudaStream_t, const StepStatus*, const DeviceSelected&, const float*, const float*,
              const float*, int) override {}

 private:
  std::size_t n_, phase_;
  DeviceArray<GpuKey> above_;
  ListMemory list_;
};

const bool cyclic_registered = (add_device_selector<DeviceCyclic>("cyclic"), true);

}  // namespace
}  // namespace topknot::cuda
