// CUDA counterparts of compress/select/topk.cpp and threshold.cpp. In steady state topk reads the
// gradient and the residual, writes u, and looks at a list of little more than k entries.
#include "compress/compressor.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "compress/select/cuda/topk_kernels.h"
#include "compress/select/selector.h"

namespace topknot::cuda {
namespace {

class DeviceTopK final : public DeviceSelector {
 public:
  DeviceTopK(const CompressOptions&, const std::vector<DeviceRange>& ranges)
      : states_(on_device(std::vector<TopKState>(ranges.size()))) {}

  std::size_t capacity(std::size_t n, double density) const override { return target_count(density, n); }
  std::size_t list_limit(std::size_t n, double density) const override {
    return topknot::list_limit(target_count(density, n));
  }

  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    topk_select(stream, ranges, states_.data(), accumulate, parameters);
  }

  void commit(cudaStream_t stream, const SelectRanges& ranges, const StepStatus* status,
              const DeviceOutcome&) override {
    topk_commit(stream, ranges, states_.data(), status);
  }

 private:
  DeviceArray<TopKState> states_;
};

class DeviceThreshold final : public DeviceSelector {
 public:
  DeviceThreshold(const CompressOptions& options, const std::vector<DeviceRange>& ranges)
      : multiple_(options.capacity), threshold_(fixed_threshold(options)), counts_(ranges.size()) {}

  std::size_t capacity(std::size_t n, double density) const override {
    return capacity_within(multiple_, target_count(density, n), n);
  }
  // How many exceed the threshold is data-dependent; a longer list is taken from u by two more passes.
  std::size_t list_limit(std::size_t n, double density) const override {
    return topknot::list_limit(target_count(density, n));
  }

  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    threshold_select(stream, ranges, counts_.data(), threshold_, multiple_, accumulate, parameters);
  }

 private:
  double multiple_, threshold_;
  DeviceArray<std::uint32_t> counts_;  // k, by range
};

const bool topk_registered = [] {
  add_device_selector<DeviceTopK>("topk");
  add_device_selector<DeviceThreshold>("threshold");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
