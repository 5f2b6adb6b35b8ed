// CUDA counterpart of compress/select/gaussiank.h. In steady state, where the rule ends at the threshold
// at which it ended last step, 16 bytes per element; else 24.
#include "compress/compressor.h"
#include "compress/parallel.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gaussiank_kernels.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "compress/select/passes/normal_quantile.h"

namespace topknot::cuda {
namespace {

static_assert(kMomentsChunk == kChunk, "sums are made by the CPU's chunks");

class DeviceGaussianK final : public DeviceSelector {
 public:
  DeviceGaussianK(const CompressOptions& options, std::size_t n, std::size_t)
      : multiple_(options.capacity), n_(n), state_(1), chunks_((n + kMomentsChunk - 1) / kMomentsChunk) {
    gaussiank_reset(Context::current().stream(), state_.data());
  }

  std::size_t capacity(double density) const override {
    return capacity_within(multiple_, target_count(density, n_), n_);
  }
  void set_density(double density) override {
    list_ = ListMemory(n_, 16 * target_count(density, n_) + 4096);
    quantile_ = {density, -normal_quantile(density / 2)};
  }

  void select(cudaStream_t stream, const Accumulate& accumulate, const StepParameters* parameters,
              const DeviceSelected& selected) override {
    TOPKNOT_CHECK(list_.list().limit > 0, "set_density() comes before select()");
    GaussianKState* state = state_.data();
    gaussiank_begin(stream, state, parameters, accumulate, n_);
    gaussiank_moments(stream, state, parameters, quantile_, accumulate, n_, chunks_.data());
    gaussiank_count(stream, state, accumulate.u, n_, list_.tiles(), list_.list());
    gaussiank_decide(stream, state, list_.list(), multiple_, selected.capacity, stats_of(selected));
    take_largest(stream, source_of(list_.list()), source_of(accumulate.u, n_), scratch_.memory(),
                 &state->choice, taken_of(selected));
  }

  void commit(cudaStream_t stream, const StepStatus* status, const DeviceSelected&, const float*,
              const float*, const float*, int) override {
    gaussiank_commit(stream, state_.data(), status);
  }

 private:
  double multiple_;  // compress.capacity
  std::size_t n_;
  DeviceArray<GaussianKState> state_;
  DeviceArray<ChunkMoments> chunks_;
  ListMemory list_;
  LargestScratch scratch_;
  DensityQuantile quantile_ = {-1, 0};
};

const bool gaussiank_registered = [] {
  add_device_selector<DeviceGaussianK>("gaussiank");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
