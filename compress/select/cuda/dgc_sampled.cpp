#include "compress/select/dgc_rule.h"

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/dgc_sampled_kernels.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "nn/core/cuda/context.h"
#include "nn/core/rng.h"

namespace topknot::cuda {
namespace {

class DgcSampledOnGpu final : public DeviceSelector {
 public:
  DgcSampledOnGpu(const CompressOptions& options, const std::vector<DeviceRange>& ranges)
      : controls_(on_device(std::vector<DgcControl>(ranges.size()))), choices_(2 * ranges.size()) {
    const DgcSampledOptions given = dgc_sampled_options(options);
    rule_.sample_ratio = given.sample_ratio;
    rule_.resample = given.resample;
    rule_.lowest = given.lowest;
    rule_.stream = CounterRng(options.seed, RngUse::compress).stream();
    std::size_t most = 0;
    for (const DeviceRange& range : ranges) most += dgc_most_samples(range.n);
    samples_ = DeviceArray<float>(most);
    std::vector<Source> sources;
    float* at = samples_.data();
    for (const DeviceRange& range : ranges) {
      const std::size_t room = dgc_most_samples(range.n);
      sources.push_back({at, nullptr, &controls_.data()[sources.size()].samples, room});
      at += room;
    }
    sources_ = on_device(sources);
  }

  std::size_t capacity(std::size_t n, double density) const override {
    return dgc::selected_count(density, n);
  }
  std::size_t list_limit(std::size_t n, double density) const override {
    return 4 * dgc::selected_count(density, n) + 4096;
  }

  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    const DgcWork work{controls_.data(), sources_.data(), choices_.data(), choices_.data() + ranges.count};
    dgc_sampled_select(stream, rule_, ranges, work, accumulate, parameters);
  }

 private:
  DgcRule rule_;
  DeviceArray<float> samples_;
  DeviceArray<DgcControl> controls_;
  DeviceArray<Source> sources_;
  DeviceArray<Choice> choices_;
};

const bool dgc_sampled_registered = [] {
  add_device_selector<DgcSampledOnGpu>("dgc_sampled");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
