#pragma once
// The selections that have kernels: what make_device_selector() chooses from.

#include <cstddef>
#include <memory>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_select.h"
#include "compress/select/cuda/topk_kernels.h"

namespace topknot::cuda {

// For ranges of n elements; each as the CPU's selector of that name (compress/select/NAME.h).
std::unique_ptr<DeviceSelector> make_device_topk(const CompressOptions& options, std::size_t n);
std::unique_ptr<DeviceSelector> make_device_threshold(const CompressOptions& options, std::size_t n);
std::unique_ptr<DeviceSelector> make_device_gaussiank(const CompressOptions& options, std::size_t n);
std::unique_ptr<DeviceSelector> make_device_dgc_sampled(const CompressOptions& options, std::size_t n,
                                                        std::size_t position);
// Its scores hold tanh in double: a GPU's may differ from the host's in the last bit, so that a score, which is
// rounded to float, differs in its last bit about once in 2^28, and only where that bit decides who is the k-th does
// another entry travel.
std::unique_ptr<DeviceSelector> make_device_regtopk(const CompressOptions& options, std::size_t n);

inline StatsOut stats_of(const DeviceSelected& selected) {
  DeviceSelected::Stats* stats = selected.stats;
  return {&stats->count, &stats->finite, &stats->over, &stats->threshold};
}
inline Taken taken_of(const DeviceSelected& selected) {
  return {selected.indices, selected.values, selected.capacity, &selected.stats->threshold};
}
// The capacity of methods that bound nothing themselves: compress.capacity times k, or everything.
inline std::size_t capacity_within(const CompressOptions& options, std::size_t k, std::size_t n) {
  const double most = options.capacity * static_cast<double>(k);
  return options.capacity == 0 || most >= static_cast<double>(n) ? n : static_cast<std::size_t>(most);
}

}  // namespace topknot::cuda
