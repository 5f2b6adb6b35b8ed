// CUDA counterpart of compress/select/gaussiank.cpp. In steady state, where the rule ends at the threshold
// at which it ended last step, 16 bytes per element; else 24.
#include "compress/compressor.h"
#include "compress/parallel.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gaussiank_kernels.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "compress/select/passes/quantiles.h"

namespace topknot::cuda {
namespace {

static_assert(kMomentsChunk == kChunk, "sums are made by the CPU's chunks");

class DeviceGaussianK final : public DeviceSelector {
 public:
  DeviceGaussianK(const CompressOptions& options, const std::vector<DeviceRange>& ranges)
      : multiple_(options.capacity), states_(on_device(std::vector<GaussianKState>(ranges.size()))) {
    std::vector<std::size_t> chunks;
    for (const DeviceRange& range : ranges) chunks.push_back((range.n + kMomentsChunk - 1) / kMomentsChunk);
    table_ = BlockTable(chunks);
    chunks_ = DeviceArray<ChunkMoments>(table_.blocks().count);
  }

  std::size_t capacity(std::size_t n, double density) const override {
    return capacity_within(multiple_, target_count(density, n), n);
  }
  std::size_t list_limit(std::size_t n, double density) const override {
    return 16 * target_count(density, n) + 4096;
  }
  void set_density(const std::vector<double>& densities) override {
    std::vector<DensityQuantile> quantiles;
    for (const double density : densities) quantiles.push_back({density, -normal_quantile(density / 2)});
    quantiles_ = on_device(quantiles);
  }

  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    const GaussianKWork work{states_.data(), quantiles_.data(), table_.blocks(), chunks_.data()};
    gaussiank_select(stream, ranges, work, multiple_, accumulate, parameters);
  }

  void commit(cudaStream_t stream, const SelectRanges& ranges, const StepStatus* status,
              const DeviceOutcome&) override {
    gaussiank_commit(stream, ranges, states_.data(), status);
  }

 private:
  double multiple_;  // compress.capacity
  DeviceArray<GaussianKState> states_;
  BlockTable table_;
  DeviceArray<ChunkMoments> chunks_;
  DeviceArray<DensityQuantile> quantiles_;
};

const bool gaussiank_registered = [] {
  add_device_selector<DeviceGaussianK>("gaussiank");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
