// CUDA counterparts of compress/select/topk.h and threshold.h. In steady state topk reads the
// gradient and the residual, writes u, and looks at a list of little more than k entries.
#include "compress/compressor.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_select_memory.h"
#include "compress/select/cuda/topk_kernels.h"
#include "compress/select/threshold.h"

namespace topknot::cuda {
namespace {

class DeviceTopK final : public DeviceSelector {
 public:
  DeviceTopK(const CompressOptions&, std::size_t n, std::size_t) : n_(n), state_(1) {
    topk_reset(Context::current().stream(), state_.data());
  }

  std::size_t capacity(double density) const override { return target_count(density, n_); }
  void set_density(double density) override { list_ = ListMemory(n_, list_limit(target_count(density, n_))); }

  void select(cudaStream_t stream, const Accumulate& accumulate, const StepParameters* parameters,
              const DeviceSelected& selected) override {
    TOPKNOT_CHECK(list_.list().limit > 0, "set_density() comes before select()");
    topk_begin(stream, state_.data(), parameters, n_);
    accumulate_and_list(stream, accumulate, n_, &state_.data()->above, list_.tiles(), list_.list());
    topk_decide(stream, state_.data(), list_.list(), n_, selected.capacity, stats_of(selected));
    take_largest(stream, source_of(list_.list()), source_of(accumulate.u, n_), scratch_.memory(),
                 &state_.data()->choice, taken_of(selected));
  }

  void commit(cudaStream_t stream, const StepStatus* status, const DeviceSelected&, const float*,
              const float*, const float*, int) override {
    topk_commit(stream, state_.data(), status);
  }

 private:
  std::size_t n_;
  DeviceArray<TopKState> state_;
  ListMemory list_;
  LargestScratch scratch_;
};

class DeviceThreshold final : public DeviceSelector {
 public:
  DeviceThreshold(const CompressOptions& options, std::size_t n, std::size_t)
      : multiple_(options.capacity), threshold_(fixed_threshold(options)), n_(n), state_(1) {
    topk_reset(Context::current().stream(), state_.data());
  }

  std::size_t capacity(double density) const override {
    return capacity_within(multiple_, target_count(density, n_), n_);
  }
  // How many exceed the threshold is data-dependent; a longer list is taken from u by two more passes.
  void set_density(double density) override { list_ = ListMemory(n_, list_limit(target_count(density, n_))); }

  void select(cudaStream_t stream, const Accumulate& accumulate, const StepParameters* parameters,
              const DeviceSelected& selected) override {
    TOPKNOT_CHECK(list_.list().limit > 0, "set_density() comes before select()");
    threshold_begin(stream, state_.data(), parameters, threshold_, n_);
    accumulate_and_list(stream, accumulate, n_, &state_.data()->above, list_.tiles(), list_.list());
    threshold_decide(stream, state_.data(), list_.list(), threshold_, multiple_, selected.capacity,
                     stats_of(selected));
    take_largest(stream, source_of(list_.list()), source_of(accumulate.u, n_), scratch_.memory(),
                 &state_.data()->choice, taken_of(selected));
  }

  void commit(cudaStream_t, const StepStatus*, const DeviceSelected&, const float*, const float*,
              const float*, int) override {}

 private:
  double multiple_, threshold_;
  std::size_t n_;
  DeviceArray<TopKState> state_;
  ListMemory list_;
  LargestScratch scratch_;
};

const bool topk_registered = [] {
  add_device_selector<DeviceTopK>("topk");
  add_device_selector<DeviceThreshold>("threshold");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
