#include "compress/select/dgc_sampled.h"

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/dgc_sampled_kernels.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "nn/core/cuda/context.h"
#include "nn/core/rng.h"

namespace topknot::cuda {
namespace {

class DgcSampledOnGpu final : public DeviceSelector {
 public:
  DgcSampledOnGpu(const CompressOptions& options, std::size_t n, std::size_t position)
      : samples_(dgc_most_samples(n)), control_(1) {
    const DgcSampledOptions given = dgc_sampled_options(options);
    rule_.n = n;
    rule_.sample_ratio = given.sample_ratio;
    rule_.resample = given.resample;
    rule_.lowest = given.lowest;
    rule_.stream = CounterRng(options.seed, RngUse::compress).stream();
    rule_.position = position;
  }

  std::size_t capacity(double density) const override { return dgc::selected_count(density, rule_.n); }
  void set_density(double density) override { list_ = ListMemory(rule_.n, 4 * capacity(density) + 4096); }

  void select(cudaStream_t stream, const Accumulate& accumulate, const StepParameters* parameters,
              const DeviceSelected& selected) override {
    DgcRule rule = rule_;
    rule.capacity = selected.capacity;
    DgcControl* const control = control_.data();
    const EntryList& list = list_.list();
    const Source u = source_of(accumulate.u, rule.n);
    const Source samples{samples_.data(), samples_.data(), nullptr, &control->samples, samples_.size()};
    const StatsOut stats = stats_of(selected);
    dgc_plan(stream, rule, parameters, control);
    dgc_sample(stream, accumulate, control, samples_.data(), samples_.size());
    find_kth(stream, samples, samples, scratch_.memory(), &control->of_samples);
    dgc_bound(stream, control);
    accumulate_and_list(stream, accumulate, rule.n, &control->above, list_.tiles(), list);
    find_kth(stream, u, u, scratch_.memory(), &control->of_vector);
    dgc_judge(stream, rule, list, control, stats);
    for (int i = 0; i < (rule.resample ? 1 : dgc::kAdaptations); ++i)
      dgc_adapt(stream, rule, accumulate.u, list, control, stats);
    take_largest(stream, source_of(list), u, scratch_.memory(), &control->final, taken_of(selected));
  }

  void commit(cudaStream_t, const StepStatus*, const DeviceSelected&, const float*, const float*,
              const float*, int) override {}

 private:
  DgcRule rule_;
  ListMemory list_;
  LargestScratch scratch_;
  DeviceArray<float> samples_;
  DeviceArray<DgcControl> control_;
};

const bool dgc_sampled_registered = [] {
  add_device_selector<DgcSampledOnGpu>("dgc_sampled");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
