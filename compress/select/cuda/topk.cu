// CUDA counterparts of compress/select/topk.cpp and threshold.cpp. In steady state topk reads the
// gradient and the residual, writes u, and looks at a list of little more than k entries.
#include <topknot_kernel.h>

#include "compress/compressor.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "compress/select/selector.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// Of a range, in GPU memory.
struct TopKState {
  CarriedBound carried;
  std::uint32_t k = 0;               // of this step
  std::uint32_t updates_bound = 0;   // 1: the step's k-th key becomes the bound
  ListState list = ListState::good;  // what this step's list was like
};

// The kernels have a thread per range.

__global__ void topk_begin_kernel(SelectRanges ranges, TopKState* states, const StepParameters* parameters) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  TopKState& state = states[r];
  state.k = static_cast<std::uint32_t>(density_count(range.density(*parameters), range.n));
  ranges.above[r] = state.carried.above(state.k == range.n);
}

__global__ void topk_decide_kernel(SelectRanges ranges, TopKState* states) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  TopKState& state = states[r];
  const ListStats found = *range.list.stats;
  const std::uint32_t k = state.k < range.taken.capacity ? state.k : range.taken.capacity;
  state.list = list_state(found.count <= list_limit(k) && found.count <= range.list.limit, found.count, k);
  state.updates_bound = found.finite && k < range.n;
  Choice choice;
  choice.skip = !found.finite;
  choice.whole = state.list != ListState::good;
  choice.k = k;
  ranges.choices[r] = choice;
  range.stats->count = found.finite ? k : 0;
  range.stats->finite = found.finite;
  range.stats->over = 0;
  range.stats->threshold = 0;  // until the k-th magnitude is known
}

__global__ void topk_commit_kernel(SelectRanges ranges, TopKState* states, const StepStatus* status) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count || status->bad || !states[r].updates_bound) return;
  states[r].carried = states[r].carried.after(ranges.choices[r].kth, states[r].list);
}

// The k largest, from the list of what exceeds the last bound where it holds them.
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
    launch(topk_begin_kernel, thread_per_range(ranges), kThreads, stream, ranges, states_.data(), parameters);
    accumulate_and_list(stream, ranges, accumulate);
    launch(topk_decide_kernel, thread_per_range(ranges), kThreads, stream, ranges, states_.data());
    take_largest(stream, ranges, accumulate.u);
  }

  void commit(cudaStream_t stream, const SelectRanges& ranges, const StepStatus* status,
              const DeviceOutcome&) override {
    launch(topk_commit_kernel, thread_per_range(ranges), kThreads, stream, ranges, states_.data(), status);
  }

  DeviceDiagnostics diagnostics(std::size_t range) const override {
    const TopKState state = on_host(states_.data() + range, 1).front();
    DeviceDiagnostics told;
    told.carried = state.carried;
    told.list = state.list;
    return told;
  }

 private:
  DeviceArray<TopKState> states_;
};

__global__ void threshold_begin_kernel(SelectRanges ranges, std::uint32_t* counts,
                                       const StepParameters* parameters, double threshold) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const double density = ranges.range[r].density(*parameters);
  counts[r] = static_cast<std::uint32_t>(density_count(density, ranges.range[r].n));
  ranges.above[r] = density >= 1 ? -1 : key_below(threshold);
}

__global__ void threshold_decide_kernel(SelectRanges ranges, const std::uint32_t* counts, double threshold,
                                        double multiple) {
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  const ListStats found = *range.list.stats;
  const MagnitudeKey above = ranges.above[r];
  Choice choice;
  std::uint32_t kept = 0, over = 0;
  choose_within(multiple, counts[r], found.finite ? found.count : 0, above, choice, kept, over);
  choice.whole = found.count > range.list.limit;
  ranges.choices[r] = choice;
  range.stats->count = kept < range.taken.capacity ? kept : range.taken.capacity;
  range.stats->finite = found.finite;
  range.stats->over = over;
  range.stats->threshold = found.finite && above >= 0 ? static_cast<float>(threshold) : 0.0f;
}

// What exceeds the threshold, under compress.capacity.
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
    launch(threshold_begin_kernel, thread_per_range(ranges), kThreads, stream, ranges, counts_.data(),
           parameters, threshold_);
    accumulate_and_list(stream, ranges, accumulate);
    launch(threshold_decide_kernel, thread_per_range(ranges), kThreads, stream, ranges, counts_.data(),
           threshold_, multiple_);
    take_largest(stream, ranges, accumulate.u);
  }

 private:
  double multiple_, threshold_;        // compress.capacity; compress.threshold
  DeviceArray<std::uint32_t> counts_;  // k, by range
};

const bool topk_registered = [] {
  add_device_selector<DeviceTopK>("topk");
  add_device_selector<DeviceThreshold>("threshold");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
